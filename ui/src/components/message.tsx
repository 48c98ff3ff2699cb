/** Message: one message of a conversation, whatever its content is made of. */
import { bytes, oneLine } from "../lib/format";
import type { Message } from "../lib/records";
import { useState } from "preact/hooks";
import { Json, parsed } from "./json";
import { Text } from "./text";

/** `calls`: with the tool calls that it asks for; a turn's answer has them beside their results instead. */
export function MessageView(props: { message: Message; thinking?: boolean; calls?: boolean }) {
  const { message, thinking = true, calls = true } = props;
  const reasoning = message.reasoning ?? message.reasoning_content;
  return (
    <div class={`message ${["user", "assistant", "tool"].includes(message.role) ? message.role : ""}`}>
      <div class="role">
        {oneLine(message.role, 40)}
        {message.name && ` ${oneLine(message.name, 60)}`}
      </div>
      {thinking && typeof reasoning === "string" && reasoning !== "" && <Reasoning text={reasoning} />}
      <Content content={message.content} thinking={thinking} />
      {typeof message.refusal === "string" && <Text text={message.refusal} label="the refusal" />}
      {calls && callsIn(message).map((call, n) => <CallView key={n} call={call} meta={false} />)}
    </div>
  );
}

function Reasoning({ text }: { text: string }) {
  return (
    <details>
      <summary class="quiet">
        thinks ({bytes(text.length)}): {oneLine(text, 80)}
      </summary>
      <Text text={text} label="the reasoning" />
    </details>
  );
}

export const THINK = /^\s*<think>([\s\S]*?)<\/think>\s*/;

function Content({ content, thinking }: { content: unknown; thinking: boolean }) {
  if (content === null || content === undefined || content === "") return null;
  if (typeof content === "string") {
    const think = THINK.exec(content);
    if (!think) return <Text text={content} label="the message" />;
    return (
      <>
        {thinking && <Reasoning text={think[1] ?? ""} />}
        <Text text={content.slice(think[0].length)} label="the message" />
      </>
    );
  }
  if (!Array.isArray(content)) return <Json value={content} />;
  return (
    <>
      {content.map((part: unknown, n) => (
        <Part key={n} part={part} />
      ))}
    </>
  );
}

function Part({ part }: { part: unknown }) {
  if (typeof part === "string") return <Text text={part} />;
  const { type, text, image_url } = (part ?? {}) as { type?: string; text?: unknown; image_url?: unknown };
  if (typeof text === "string") return <Text text={text} label="the message" />;
  const url = typeof image_url === "string" ? image_url : (image_url as { url?: unknown } | undefined)?.url;
  if (typeof url === "string") return <Picture url={url} />;
  if (type === undefined) return <Json value={part} />;
  return <Json name={type} value={part} />;
}

/** A picture: those within the record are shown when asked for; those elsewhere are never loaded. */
function Picture({ url }: { url: string }) {
  const [shown, setShown] = useState(false);
  if (!/^data:image\/(png|jpeg|gif|webp);base64,/.test(url)) {
    return <p class="hint">a picture elsewhere, which is not loaded: {oneLine(url, 200)}</p>;
  }
  return shown ? (
    <img src={url} alt="A picture in the message" style={{ maxWidth: "100%" }} />
  ) : (
    <button onClick={() => setShown(true)}>Show the picture: {bytes(url.length * 0.75)}</button>
  );
}

export interface ShownCall {
  id?: string;
  name: string;
  arguments: string;
  result?: unknown;
  error?: string | null;
  seconds?: number;
  shown?: string | null;
}

/** Return the tool calls that a message asks for. */
export function callsIn(message: Message): ShownCall[] {
  return (message.tool_calls ?? []).map((call) => ({
    id: call.id,
    name: call.function?.name ?? "?",
    arguments: call.function?.arguments ?? "",
  }));
}

/** A tool call with its result. */
export function CallView({ call, meta }: { call: ShownCall; meta: boolean }) {
  return (
    <div class={`call ${call.error ? "failed" : ""}`}>
      <div class="row">
        <span class="name">{oneLine(call.name, 100)}</span>
        {call.error && <span class="chip bad">failed</span>}
        {meta && call.seconds !== undefined && <span class="quiet">{call.seconds.toFixed(3)} s</span>}
      </div>
      <Value text={call.arguments} name="arguments" open />
      {call.error && <Text text={call.error} label="the error" />}
      {call.shown !== null && call.shown !== undefined ? (
        <>
          <Text text={call.shown} lines={12} label="what the model read" />
          <Value text={call.result} name="whole result" />
        </>
      ) : (
        call.result !== undefined && call.result !== null && <Value text={call.result} name="result" open />
      )}
    </div>
  );
}

function Value({ text, name, open = false }: { text: unknown; name: string; open?: boolean }) {
  if (typeof text !== "string") return <Json name={name} value={text} open={open} />;
  const value = parsed(text);
  return value === undefined ? (
    <div>
      <span class="hint">{name}</span>
      <Text text={text} lines={12} characters={1500} label={name} />
    </div>
  ) : (
    <Json name={name} value={value} open={open && text.length < 4000} />
  );
}
