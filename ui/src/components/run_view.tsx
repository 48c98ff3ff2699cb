/** Run view: outline, conversation and details of one run, with its exact tokens; a reader of any source. */
import type { ComponentChildren } from "preact";
import { useEffect } from "preact/hooks";
import { bytes, compact, number, oneLine, seconds, told } from "../lib/format";
import { useKeys, type Shortcuts } from "../lib/keyboard";
import type { components } from "../lib/openapi";
import type { RunFacts } from "../lib/records";
import { href, setParams } from "../lib/route";
import { listed, listedMore, openNeighbour } from "../lib/run_list";
import { useTurnWindows } from "../lib/turn_windows";
import { RewardChip, Tag } from "./chips";
import { MessageView, THINK } from "./message";
import { Details } from "./run_details";
import { OutlineList, type Outline } from "./run_outline";
import { Failure, NotShown } from "./states";
import { Text } from "./text";
import { TokenPanel } from "./token_panel";
import { TurnView, type Shown } from "./turn";
import { VirtualList } from "./virtual_list";

type Mark = components["schemas"]["TurnMark"];
type Mode = "text" | "tokens" | "raw";

const HIDDEN = ["calls", "thinking", "meta"] as const;
const HIDDEN_NAMES = { calls: "tool calls", thinking: "reasoning", meta: "details" };

export interface RunViewProps {
  outline: Outline;
  params: URLSearchParams;
  /** The turns are loaded again when it changes. */
  version?: number;
  retry: () => void;
  /** What can be done with the run, in the first line of its head. */
  actions?: ComponentChildren;
  keys?: Shortcuts;
}

/** Return the turn that the address names, or that sampled the token that it names alone. */
export function turnAt(outline: Outline, params: URLSearchParams): number {
  if (!params.has("t") && params.has("tok")) {
    const token = Number(params.get("tok"));
    const n = outline.data.findIndex(({ prompt = 0, sampled = 0 }) => token >= prompt && token < prompt + sampled);
    if (n >= 0) return n;
  }
  return Math.min(Math.max(0, Number(params.get("t") ?? 0) || 0), Math.max(0, outline.turns - 1));
}

export function RunView({ outline, params, version = 0, retry, actions, keys }: RunViewProps) {
  const { id } = outline;
  const facts = outline.run as unknown as RunFacts;
  const count = outline.turns;
  const windows = useTurnWindows(id, version);
  const mode = (params.get("mode") as Mode | null) ?? "text";
  const at = turnAt(outline, params);
  const token = params.get("tok") === null ? null : Number(params.get("tok"));
  const hidden = new Set((params.get("hide") ?? "").split(",").filter(Boolean));
  const shown: Shown = {
    calls: !hidden.has("calls"),
    thinking: !hidden.has("thinking"),
    meta: !hidden.has("meta"),
    raw: mode === "raw",
  };
  const goTo = (n: number) => setParams({ t: Math.min(count - 1, Math.max(0, n)), tok: null });
  const setMode = (next: Mode) => setParams({ mode: next === "text" ? null : next, tok: null });
  const toggle = (name: string) => {
    const next = new Set(hidden);
    if (!next.delete(name)) next.add(name);
    setParams({ hide: [...next].join() });
  };
  const isError = (mark: Mark) => (mark.errors ?? 0) > 0 || mark.missing === true;
  const nextError = (step: 1 | -1) => {
    for (let n = at + step; n >= 0 && n < count; n += step) {
      const mark = outline.data[n];
      if (mark && isError(mark)) return goTo(n);
    }
  };
  const firstSampled = windows.turn(at)?.prompt_tokens ?? 0;
  const setToken = (place: number) => mode === "tokens" && setParams({ tok: place });
  useKeys({
    j: ["next turn", () => goTo(at + 1)],
    k: ["previous turn", () => goTo(at - 1)],
    J: ["last turn", () => goTo(count - 1)],
    K: ["first turn", () => goTo(0)],
    e: ["next failed tool call", () => nextError(1)],
    E: ["previous failed tool call", () => nextError(-1)],
    m: ["text, tokens or raw", () => setMode(mode === "text" ? "tokens" : mode === "tokens" ? "raw" : "text")],
    n: ["next run of the list", () => openNeighbour(id, 1)],
    p: ["previous run of the list", () => openNeighbour(id, -1)],
    l: ["next token", () => setToken(token === null ? firstSampled : token + 1)],
    h: ["previous token", () => setToken(Math.max(0, (token ?? firstSampled + 1) - 1))],
    ...keys,
  });
  const link = (n: number) => href(["run", id], { ...Object.fromEntries(params), t: n, tok: null });
  return (
    <div class="run">
      <Head outline={outline} facts={facts} actions={actions}>
        <div class="row" role="group" aria-label="View">
          {(["text", "tokens", "raw"] as const).map((one) => (
            <button key={one} aria-pressed={mode === one} onClick={() => setMode(one)}>
              {one}
            </button>
          ))}
          {HIDDEN.map((name) => (
            <button key={name} aria-pressed={!hidden.has(name)} onClick={() => toggle(name)}>
              {HIDDEN_NAMES[name]}
            </button>
          ))}
        </div>
      </Head>
      <OutlineList outline={outline} at={at} goTo={goTo} />
      <section class="middle" style={{ minHeight: 0, minWidth: 0 }}>
        {windows.error && <Failure error={windows.error} retry={retry} />}
        {count === 0 ? (
          <NoTurns facts={facts} windows={windows} shown={shown} />
        ) : (
          <VirtualList
            class="conversation"
            label="Conversation"
            count={count}
            estimate={160}
            selected={at}
            again={windows.turn(at) !== undefined}
            align="start"
            onRange={windows.want}
            row={(n) => {
              const turn = windows.turn(n);
              return (
                <article class={`turn ${n === at ? "selected" : ""}`} aria-label={`turn ${n + 1}`}>
                  {!turn ? (
                    <p class="hint">turn {n + 1} …</p>
                  ) : mode === "tokens" ? (
                    n === at ? (
                      <>
                        <header>turn {n + 1}, its exact tokens</header>
                        <TokenPanel id={id} n={n} params={params} token={token} version={turn.model} />
                      </>
                    ) : (
                      <header>
                        <a href={link(n)}>turn {n + 1}</a> {compact(turn.prompt_tokens)} → {compact(turn.sampled_tokens)} tokens
                      </header>
                    )
                  ) : (
                    <TurnView turn={turn} before={n > 0 ? windows.turn(n - 1) : undefined} shown={shown} link={link(n)} />
                  )}
                  {n === count - 1 && turn && mode === "text" && windows.closing.map((one, m) => <MessageView key={m} message={one} calls={shown.calls} />)}
                </article>
              );
            }}
          />
        )}
      </section>
      <Details outline={outline} facts={facts} turn={windows.turn(at)} mark={outline.data[at]} />
    </div>
  );
}

const MOST_MESSAGES = 200; // without a turn between them

function NoTurns(props: { facts: RunFacts; windows: ReturnType<typeof useTurnWindows>; shown: Shown }) {
  const { facts, windows, shown } = props;
  useEffect(() => windows.want(0, 0), []);
  return (
    <div class="conversation" style={{ overflow: "auto", padding: "0.8rem" }} tabIndex={0} role="region" aria-label="Conversation">
      <p class="hint">No model call of this run is recorded.</p>
      {windows.closing.length ? (
        windows.closing
          .slice(0, MOST_MESSAGES)
          .map((one, n) => <MessageView key={n} message={one} thinking={shown.thinking} calls={shown.calls} />)
      ) : (
        <Text text={facts.input} />
      )}
      <NotShown count={windows.closing.length - MOST_MESSAGES} what="messages" />
    </div>
  );
}

function Head(props: { outline: Outline; facts: RunFacts; actions?: ComponentChildren; children: ComponentChildren }) {
  const { outline, facts } = props;
  const { id } = outline;
  const neighbours = listed.value;
  const place = neighbours.indexOf(id);
  return (
    <header>
      <div class="row">
        <h1 dir="auto">{oneLine(facts.input, 140) || oneLine(id)}</h1>
        <span class="spacer" />
        {place >= 0 && (
          <span class="row">
            <button disabled={place === 0} onClick={() => openNeighbour(id, -1)}>
              Previous
            </button>
            <span class="quiet">
              {place + 1} of {neighbours.length}
              {listedMore.value && " and more"}
            </span>
            <button disabled={place === neighbours.length - 1} onClick={() => openNeighbour(id, 1)}>
              Next
            </button>
          </span>
        )}
        {props.actions}
      </div>
      <div class="row">
        {outline.rewards
          .filter((one) => one.turn === null || one.turn === undefined)
          .map((one, n) => (
            <RewardChip key={n} name={one.name} value={one.value} source={one.source} />
          ))}
        <span class={`chip ${facts.error ? "bad" : ""}`}>{oneLine(facts.error ?? facts.stop_reason ?? "", 60)}</span>
        {outline.target !== null && (
          <span>
            <span class="quiet">target</span> {oneLine(told(outline.target), 120)}
          </span>
        )}
        {facts.output && (
          <span dir="auto">
            <span class="quiet">answer</span> {oneLine(facts.output.replace(THINK, ""), 120)}
          </span>
        )}
        <span class="quiet">
          {facts.imported && outline.turns === 0
            ? `imported (${oneLine(facts.imported, 40)}), without its model calls`
            : `${number(outline.turns)} ${outline.turns === 1 ? "turn" : "turns"} · ${seconds(facts.seconds)} · ${compact(facts.prompt_tokens)} → ${compact(facts.sampled_tokens)} tokens · ${bytes(outline.bytes)}`}
        </span>
        {facts.tags?.slice(0, 8).map((tag) => <Tag key={tag} text={tag} />)}
        <NotShown count={(facts.tags?.length ?? 0) - 8} what="tags" />
        <span class="spacer" />
        {props.children}
      </div>
    </header>
  );
}
