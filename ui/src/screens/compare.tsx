/** Compare: two runs, turn beside turn, with the words in which they differ. */
import { useEffect, useState } from "preact/hooks";
import { CopyAs } from "../components/copy_as";
import { Failure, Loaded, NotShown } from "../components/states";
import { VirtualList } from "../components/virtual_list";
import { get } from "../lib/api";
import { number, oneLine, plain } from "../lib/format";
import { useKeys } from "../lib/keyboard";
import type { components } from "../lib/openapi";
import type { Message } from "../lib/records";
import { useResource } from "../lib/resource";
import { go, href, setParams } from "../lib/route";
import { useTurnWindows, type TurnWindows } from "../lib/turn_windows";
import { diff } from "../lib/word_diff";
import type { ScreenProps } from ".";

type Differences = components["schemas"]["RunDifferences"];
const MOST = 20_000; // characters of an answer that are compared

export default function Compare({ params }: ScreenProps) {
  const a = params.get("a") ?? "";
  const b = params.get("b") ?? "";
  return (
    <div class="list" style={{ display: "flex", flexDirection: "column", height: "100%", gap: "0.6rem" }}>
      <Chooser key={a + b} a={a} b={b} />
      {a && b ? (
        <Pair key={a + b} a={a} b={b} at={Number(params.get("at") ?? -1)} />
      ) : (
        <p class="state">
          Give the ids of two runs. In the list of runs, <kbd>x</kbd> marks a run and <kbd>c</kbd> compares two.
        </p>
      )}
    </div>
  );
}

function Chooser({ a, b }: { a: string; b: string }) {
  const [left, setLeft] = useState(a);
  const [right, setRight] = useState(b);
  return (
    <form
      class="row"
      onSubmit={(event) => {
        event.preventDefault();
        go(href(["compare"], { a: left.trim(), b: right.trim() }));
      }}
    >
      <h1>Compare</h1>
      <label>
        Run <input value={left} onInput={(event) => setLeft(event.currentTarget.value)} />
      </label>
      <label>
        with <input value={right} onInput={(event) => setRight(event.currentTarget.value)} />
      </label>
      <button class="primary">Compare</button>
      <button type="button" onClick={() => go(href(["compare"], { a: b, b: a }))}>
        Swap
      </button>
      <span class="spacer" />
      {a && b && (
        <CopyAs
          path={`/v1/trajectories/diff?a=${encodeURIComponent(a)}&b=${encodeURIComponent(b)}`}
        />
      )}
    </form>
  );
}

function Pair({ a, b, at }: { a: string; b: string; at: number }) {
  const differences = useResource((signal) => get("/v1/trajectories/diff", { query: { a, b }, signal }), [a, b]);
  return <Loaded of={differences}>{(data) => <Turns data={data} at={at} />}</Loaded>;
}

function Turns({ data, at }: { data: Differences; at: number }) {
  const left = useTurnWindows(data.one, 0);
  const right = useTurnWindows(data.other, 0);
  const chosen = at >= 0 ? at : (data.first ?? 0);
  const step = (by: 1 | -1) => {
    for (let n = chosen + by; n >= 0 && n < data.turns.length; n += by) {
      if (!data.turns[n]!.same) return setParams({ at: n });
    }
  };
  useKeys({
    j: ["next difference", () => step(1)],
    k: ["previous difference", () => step(-1)],
  });
  const first = (data.tokens as { first?: Record<string, unknown> | null } | null)?.first;
  return (
    <>
      <div class="row">
        {data.fields.slice(0, 8).map((field) => (
          <span class="chip long" key={String(field.name)}>
            {oneLine(String(field.name), 30)}: {oneLine(JSON.stringify(field.one) ?? "", 40)} → {oneLine(JSON.stringify(field.other) ?? "", 40)}
          </span>
        ))}
        {data.rewards.slice(0, 6).map((reward, n) => (
          <span class="chip fair long" key={n}>
            {oneLine(String(reward.name), 30)} {number(reward.one as number | null)} → {number(reward.other as number | null)}
          </span>
        ))}
        <NotShown count={data.fields.length - 8} what="fields" />
        <NotShown count={data.rewards.length - 6} what="rewards" />
        {first && (
          <span class="chip bad">
            first other token: turn {String(first.turn)}, {oneLine(String(first.list), 20)} {String(first.position)}
          </span>
        )}
        {data.first === null && <span class="chip good">the turns are the same</span>}
      </div>
      {data.turns.length === 0 && <Failure error={new Error("Neither run has a recorded turn.")} />}
      <div class="compare" aria-hidden="true">
        <b>{oneLine(data.one)}</b>
        <b>{oneLine(data.other)}</b>
      </div>
      <VirtualList
        class="conversation"
        label="Turns of both runs"
        count={data.turns.length}
        estimate={140}
        selected={chosen}
        align="start"
        onRange={(from, to) => {
          for (const [windows, side] of [[left, "one"], [right, "other"]] as const) {
            const places = data.turns.slice(from, to + 1).flatMap((pair) => pair[side] ?? []);
            if (places.length) windows.want(places[0]!, places.at(-1)!);
          }
        }}
        row={(n) => {
          const pair = data.turns[n];
          if (!pair) return null;
          return (
            <article class={`turn ${n === chosen ? "selected" : ""}`} aria-label={`pair ${n + 1}`}>
              <header>
                {pair.same ? "same" : pair.differs.map((one) => <span class="chip fair" key={one}>{oneLine(one, 30)}</span>)}
              </header>
              <div class="compare">
                <Side run={data.one} n={pair.one} windows={left} other={textOf(right, pair.other)} side="left" />
                <Side run={data.other} n={pair.other} windows={right} other={textOf(left, pair.one)} side="right" />
              </div>
            </article>
          );
        }}
      />
    </>
  );
}

/** Return an answer and its tool calls as text; undefined until it is loaded. */
function textOf(windows: TurnWindows, n: number | null | undefined): string | undefined {
  if (n === null || n === undefined) return "";
  const turn = windows.turn(n);
  if (!turn) return undefined;
  const answer = turn.answer as Message | null;
  const content = typeof answer?.content === "string" ? answer.content : answer?.content ? JSON.stringify(answer.content) : "";
  const calls = turn.tool_calls.map((call) => `\n${call.name}(${call.arguments})\n= ${call.error ?? JSON.stringify(call.result)}`);
  return (content + calls.join("")).slice(0, MOST);
}

function Side(props: { run: string; n: number | null | undefined; windows: TurnWindows; other: string | undefined; side: "left" | "right" }) {
  const { run, n, windows, other, side } = props;
  useEffect(() => {
    if (n !== null && n !== undefined) windows.want(n, n);
  }, [n]);
  if (n === null || n === undefined) return <p class="hint">no such turn</p>;
  const text = textOf(windows, n);
  if (text === undefined || other === undefined) return <p class="hint">turn {n + 1} …</p>;
  const pieces = side === "left" ? diff(text, other) : diff(other, text);
  return (
    <div>
      <a href={href(["run", run], { t: n })}>turn {n + 1}</a>
      <div class="diff" dir="auto">
        {pieces
          .filter((piece) => piece.kind === "same" || piece.kind === side)
          .map((piece, m) =>
            piece.kind === "same" ? (
              <span key={m}>{plain(piece.text)}</span>
            ) : side === "left" ? (
              <del key={m}>{plain(piece.text)}</del>
            ) : (
              <ins key={m}>{plain(piece.text)}</ins>
            ),
          )}
      </div>
    </div>
  );
}
