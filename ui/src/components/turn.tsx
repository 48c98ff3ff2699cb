/** Turn: one model call in the viewer: what was new in its prompt, its answer, its tool calls with their results. */
import type { components } from "../lib/openapi";
import { compact, oneLine, seconds } from "../lib/format";
import type { Message } from "../lib/records";
import { RewardChip } from "./chips";
import { Json } from "./json";
import { CallView, callsIn, MessageView, type ShownCall } from "./message";

export type ShownTurn = components["schemas"]["ShownTurn"];

export interface Shown {
  calls: boolean;
  thinking: boolean;
  meta: boolean;
  raw: boolean;
}

export function TurnView(props: { turn: ShownTurn; before: ShownTurn | undefined; shown: Shown; link: string }) {
  const { turn, before, shown, link } = props;
  const answer = turn.answer as Message | null;
  const answered = new Set(before?.tool_calls.map((call) => call.id));
  // results of the turn before stand with its calls
  const added = (turn.messages as unknown as Message[]).filter(
    (message) => message.role !== "tool" || !answered.has(message.tool_call_id ?? ""),
  );
  return (
    <>
      <header>
        <a href={link}>turn {turn.n + 1}</a>
        {shown.meta && (
          <>
            <span>{oneLine(turn.model ?? "no recorded call", 60)}</span>
            <span>
              {compact(turn.prompt_tokens)} → {compact(turn.sampled_tokens)} tokens
            </span>
            <span>{seconds(turn.seconds)}</span>
            {turn.finish_reason && <span>{oneLine(turn.finish_reason, 30)}</span>}
          </>
        )}
        {turn.seams.map((seam) => (
          <span class="chip bad" key={seam.at}>
            {oneLine(seam.model, 40)} from token {seam.at}
          </span>
        ))}
        {turn.rewards.map((reward, n) => (
          <RewardChip key={n} name={reward.name} value={reward.value} source={reward.source} />
        ))}
        {turn.redacted.map((one) => (
          <span class="chip fair" key={one.kind}>
            {one.count} {oneLine(one.kind, 30)} removed
          </span>
        ))}
      </header>
      {shown.raw ? (
        <Json value={turn} open />
      ) : (
        <>
          {turn.skipped > 0 && shown.meta && before === undefined && turn.n > 0 && (
            <p class="hint">{turn.skipped} messages before are those of earlier turns.</p>
          )}
          {added.map((message, n) => (
            <MessageView key={n} message={message} thinking={shown.thinking} calls={shown.calls} />
          ))}
          {answer && <MessageView message={answer} thinking={shown.thinking} calls={false} />}
          {shown.calls && callsOf(turn, answer).map((call, n) => <CallView key={n} call={call} meta={shown.meta} />)}
        </>
      )}
    </>
  );
}

/** Return the calls that were carried out, else those that the answer asks for. */
function callsOf(turn: ShownTurn, answer: Message | null): ShownCall[] {
  if (turn.tool_calls.length) return turn.tool_calls as ShownCall[];
  return answer ? callsIn(answer) : [];
}
