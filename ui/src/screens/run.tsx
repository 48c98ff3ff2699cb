/** Run: one trajectory: outline, conversation, and the exact tokens behind every answer. */
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { RewardChip, Tag, Version } from "../components/chips";
import { CopyAs, quoted } from "../components/copy_as";
import { MessageView } from "../components/message";
import { RewardDialog } from "../components/reward_dialog";
import { ScreenLink } from "../components/screen_link";
import { Failure, Loaded } from "../components/states";
import { Text } from "../components/text";
import { Legend, MEASURES, TokenFacts, Tokens, type Measure } from "../components/tokens";
import { TurnView, type Shown } from "../components/turn";
import { VirtualList } from "../components/virtual_list";
import { get, post } from "../lib/api";
import { bytes, compact, number, oneLine, seconds, time } from "../lib/format";
import { useKeys } from "../lib/keyboard";
import type { components } from "../lib/openapi";
import type { RunFacts } from "../lib/records";
import { useResource } from "../lib/resource";
import { go, href, setParams } from "../lib/route";
import { listed, openNeighbour } from "../lib/run_list";
import { features } from "../lib/session";
import { useTurnWindows } from "../lib/turn_windows";
import type { ScreenProps } from ".";

type Outline = components["schemas"]["RunOutline"];
type Mark = components["schemas"]["TurnMark"];
type Mode = "text" | "tokens" | "raw";

const MARKS = 10_000; // in one answer of the outline
const HIDDEN = ["calls", "thinking", "meta"] as const;
const HIDDEN_NAMES = { calls: "tool calls", thinking: "reasoning", meta: "details" };

export default function RunScreen({ path, params }: ScreenProps) {
  const id = path[0] ?? "";
  const outline = useResource((signal) => loadOutline(id, signal), [id]);
  if (!id) return <Failure error={new Error("The address names no run.")} />;
  return (
    <Loaded of={outline} key={id}>
      {(data) => <Run key={id} outline={data} params={params} reload={outline.reload} />}
    </Loaded>
  );
}

async function loadOutline(id: string, signal: AbortSignal): Promise<Outline> {
  const sent = (from: number) => ({ path: { run_id: id }, query: { from, limit: MARKS }, signal });
  const first = await get("/v1/trajectories/{run_id}/outline", sent(0));
  let more = first.has_more;
  while (more) {
    const next = await get("/v1/trajectories/{run_id}/outline", sent(first.data.length));
    first.data.push(...next.data);
    more = next.has_more && next.data.length > 0;
  }
  return first;
}

function Run({ outline, params, reload }: { outline: Outline; params: URLSearchParams; reload: () => void }) {
  const { id } = outline;
  const facts = outline.run as unknown as RunFacts;
  const count = outline.turns;
  const [version, setVersion] = useState(0);
  const windows = useTurnWindows(id, version);
  const [rewarding, setRewarding] = useState<{ value?: number } | null>(null);
  const mode = (params.get("mode") as Mode | null) ?? "text";
  const at = Math.min(Math.max(0, Number(params.get("t") ?? 0) || 0), Math.max(0, count - 1));
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
    r: ["reward the run or the turn", () => setRewarding({})],
    ...Object.fromEntries(
      [1, 2, 3, 4, 5].map((n) => [String(n), [`reward ${(n - 1) / 4}`, () => setRewarding({ value: (n - 1) / 4 })]]),
    ),
    l: ["next token", () => setToken(token === null ? firstSampled : token + 1)],
    h: ["previous token", () => setToken(Math.max(0, (token ?? firstSampled + 1) - 1))],
  });
  const link = (n: number) => href(["run", id], { ...Object.fromEntries(params), t: n, tok: null });
  return (
    <div class="run">
      <Head outline={outline} facts={facts} at={at} reward={() => setRewarding({})}>
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
        {windows.error && <Failure error={windows.error} retry={() => setVersion((n) => n + 1)} />}
        {count === 0 ? (
          <NoTurns facts={facts} windows={windows} />
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
                <article class={`turn ${n === at ? "selected" : ""}`} aria-label={`turn ${n}`}>
                  {!turn ? (
                    <p class="hint">turn {n} …</p>
                  ) : mode === "tokens" ? (
                    n === at ? (
                      <>
                        <header>turn {n}, its exact tokens</header>
                        <TokenPanel id={id} n={n} params={params} token={token} version={turn.model} />
                      </>
                    ) : (
                      <header>
                        <a href={link(n)}>turn {n}</a> {compact(turn.prompt_tokens)} → {compact(turn.sampled_tokens)} tokens
                      </header>
                    )
                  ) : (
                    <TurnView turn={turn} before={n > 0 ? windows.turn(n - 1) : undefined} shown={shown} link={link(n)} />
                  )}
                  {n === count - 1 && turn && mode === "text" && windows.closing.map((one, m) => <MessageView key={m} message={one} />)}
                </article>
              );
            }}
          />
        )}
      </section>
      <Details outline={outline} facts={facts} turn={windows.turn(at)} mark={outline.data[at]} />
      {rewarding && (
        <RewardDialog
          run={id}
          turn={count ? at : undefined}
          value={rewarding.value}
          close={() => setRewarding(null)}
          done={() => {
            reload();
            setVersion((n) => n + 1);
          }}
        />
      )}
    </div>
  );
}

function NoTurns({ facts, windows }: { facts: RunFacts; windows: ReturnType<typeof useTurnWindows> }) {
  useEffect(() => windows.want(0, 0), []);
  return (
    <div class="conversation" style={{ overflow: "auto", padding: "0.8rem" }} tabIndex={0} role="region" aria-label="Conversation">
      <p class="hint">No model call of this run is recorded.</p>
      {windows.closing.length ? (
        windows.closing.slice(0, 200).map((one, n) => <MessageView key={n} message={one} />)
      ) : (
        <Text text={facts.input} />
      )}
    </div>
  );
}

function Head(props: { outline: Outline; facts: RunFacts; at: number; reward: () => void; children: preact.ComponentChildren }) {
  const { outline, facts, at } = props;
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
            </span>
            <button disabled={place === neighbours.length - 1} onClick={() => openNeighbour(id, 1)}>
              Next
            </button>
          </span>
        )}
        <button onClick={props.reward}>Reward</button>
        <button onClick={() => go(href(["playground"], { run: id, t: at }))}>Playground</button>
        <CopyAs
          cli={`cray-agents runs show ${quoted(id)}`}
          python={`await Platform().run(${JSON.stringify(id)})`}
          path={`/v1/trajectories/${encodeURIComponent(id)}/turns?from=${at}&limit=1`}
        />
      </div>
      <div class="row">
        {outline.rewards
          .filter((one) => one.turn === null || one.turn === undefined)
          .map((one, n) => (
            <RewardChip key={n} name={one.name} value={one.value} source={one.source} />
          ))}
        <span class={`chip ${facts.error ? "bad" : ""}`}>{oneLine(facts.error ?? facts.stop_reason ?? "", 60)}</span>
        <span class="quiet">
          {number(outline.turns)} turns · {seconds(facts.seconds)} · {compact(facts.prompt_tokens)} →{" "}
          {compact(facts.sampled_tokens)} tokens · {bytes(outline.bytes)}
        </span>
        {facts.tags?.slice(0, 8).map((tag) => <Tag key={tag} text={tag} />)}
        <span class="spacer" />
        {props.children}
      </div>
    </header>
  );
}

function OutlineList({ outline, at, goTo }: { outline: Outline; at: number; goTo: (n: number) => void }) {
  const [text, setText] = useState("");
  const input = useRef<HTMLInputElement>(null);
  useKeys({ "/": ["find in the outline", () => input.current?.focus()] });
  const marks = useMemo(() => {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) return outline.data;
    return outline.data.filter((mark) => {
      const line = [
        mark.n,
        ...(mark.tools ?? []),
        mark.model ?? "",
        mark.finish ?? "",
        mark.errors ? "error failed" : "",
        mark.seams?.length ? "seam" : "",
        mark.reward !== null && mark.reward !== undefined ? "reward" : "",
      ]
        .join(" ")
        .toLowerCase();
      return words.every((word) => line.includes(word));
    });
  }, [outline, text]);
  return (
    <aside class="outline" aria-label="Outline">
      <input
        ref={input}
        type="search"
        aria-label="Find in the outline: a tool, error, seam, reward"
        placeholder="tool, error, seam, reward …"
        value={text}
        onInput={(event) => setText(event.currentTarget.value)}
      />
      <VirtualList
        label="Turns"
        count={marks.length}
        estimate={30}
        keyOf={(n) => marks[n]?.n ?? n}
        selected={marks.findIndex((mark) => mark.n === at)}
        row={(n) => {
          const mark = marks[n];
          return (
            mark && (
              <button
                class={`mark ${mark.n === at ? "selected" : ""} ${mark.errors ? "failed" : ""}`}
                aria-current={mark.n === at ? "true" : undefined}
                onClick={() => goTo(mark.n)}
              >
                <span class="line">
                  <span>
                    {mark.n} {oneLine((mark.tools ?? []).join(", ") || mark.finish || (mark.missing ? "not recorded" : ""), 60)}
                    {(mark.calls ?? 0) > (mark.tools?.length ?? 0) && ` +${(mark.calls ?? 0) - (mark.tools?.length ?? 0)}`}
                  </span>
                  {(mark.seams?.length ?? 0) > 0 && <span class="chip bad">seam</span>}
                  {mark.reward !== null && mark.reward !== undefined && <span class="chip fair">{number(mark.reward)}</span>}
                  <span class="quiet">{compact(mark.sampled ?? 0)}</span>
                </span>
              </button>
            )
          );
        }}
      />
      {outline.data.length !== marks.length && (
        <p class="hint">
          {marks.length} of {outline.data.length} turns
        </p>
      )}
    </aside>
  );
}

function TokenPanel(props: { id: string; n: number; params: URLSearchParams; token: number | null; version: string | null }) {
  const { id, n, params, token, version } = props;
  const measure = (params.get("color") as Measure | null) ?? "logprob";
  const prompt = params.get("prompt") === "1";
  const other = params.get("against") ?? "";
  const tokens = useResource(
    (signal) =>
      get("/v1/trajectories/{run_id}/turns/{number}/tokens", {
        path: { run_id: id, number: n },
        query: { prompt: prompt ? "true" : "false" } as never,
        signal,
      }),
    [id, n, prompt],
  );
  const scored = measure === "delta" || measure === "entropy";
  const score = useResource(
    (signal) =>
      scored && other
        ? post("/v1/trajectories/{run_id}/turns/{number}/score", {
            path: { run_id: id, number: n },
            body: { model: other, top: 5 },
            signal,
          })
        : Promise.resolve(undefined),
    [id, n, scored, other],
  );
  const [text, setText] = useState(other || version || "");
  return (
    <>
      <div class="row">
        <label>
          Colour{" "}
          <select
            value={measure}
            onChange={(event) => setParams({ color: event.currentTarget.value, against: other || null })}
          >
            {Object.entries(MEASURES).map(([name, about]) => (
              <option key={name} value={name} disabled={(name === "delta" || name === "entropy") && !features.value.includes("score")}>
                {about}
              </option>
            ))}
          </select>
        </label>
        {scored && (
          <form
            class="row"
            onSubmit={(event) => {
              event.preventDefault();
              setParams({ against: text });
            }}
          >
            <label>
              Version{" "}
              <input value={text} placeholder="name@N" onInput={(event) => setText(event.currentTarget.value)} />
            </label>
            <button>Score</button>
          </form>
        )}
        <label>
          <input type="checkbox" checked={prompt} onChange={(event) => setParams({ prompt: event.currentTarget.checked ? 1 : null })} />{" "}
          with the prompt
        </label>
        <Legend measure={measure} />
      </div>
      {scored && score.error && <Failure error={score.error} retry={score.reload} />}
      {scored && other && score.loading && <p class="hint">An engine scores the tokens …</p>}
      <Loaded of={tokens}>
        {(data) => (
          <>
            {!data.exact && <p class="hint">This tokenizer has no exact bytes of tokens: texts are of each token alone.</p>}
            <Tokens tokens={data} score={score.data} measure={measure} selected={token} onSelect={(place) => setParams({ tok: place })} />
            {token !== null && token >= data.first && token < data.first + data.ids.length && (
              <div class="card">
                <TokenFacts tokens={data} score={score.data} place={token} />
              </div>
            )}
          </>
        )}
      </Loaded>
    </>
  );
}

function Details(props: {
  outline: Outline;
  facts: RunFacts;
  turn: components["schemas"]["ShownTurn"] | undefined;
  mark: Mark | undefined;
}) {
  const { outline, facts, turn, mark } = props;
  return (
    <aside class="details" aria-label="Details" tabIndex={0}>
      <section class="card">
        <h2>Run</h2>
        <dl class="facts">
          <dt>id</dt>
          <dd class="mono">{oneLine(outline.id)}</dd>
          <dt>agent</dt>
          <dd>{oneLine(facts.agent ?? "")}</dd>
          <dt>model</dt>
          <dd>{(facts.models?.length ? facts.models : [facts.model]).slice(0, 10).map((one) => <div key={one}><Version id={one} /></div>)}</dd>
          {facts.loop && (
            <>
              <dt>loop</dt>
              <dd>
                <ScreenLink to={["loop", facts.loop]}>{oneLine(facts.loop)}</ScreenLink> generation {number(facts.generation)}
                {facts.attempt !== null && `, attempt ${facts.attempt}`}
              </dd>
            </>
          )}
          {facts.task && (
            <>
              <dt>task</dt>
              <dd>
                <ScreenLink to={["runs"]} params={{ q: `task:${facts.task}` }}>
                  {oneLine(facts.task, 60)}
                </ScreenLink>{" "}
                ({facts.split})
              </dd>
            </>
          )}
          <dt>started</dt>
          <dd>{time(facts.started)}</dd>
        </dl>
      </section>
      {outline.rewards.length > 0 && (
        <section class="card">
          <h2>Rewards</h2>
          {outline.rewards.slice(0, 50).map((one, n) => (
            <div key={n}>
              <RewardChip name={one.name} value={one.value} source={one.source} turn={one.turn} />{" "}
              <span class="quiet">
                {one.turn !== null && one.turn !== undefined && (
                  <a href={href(["run", outline.id], { t: one.turn })}>turn {one.turn}</a>
                )}{" "}
                {oneLine(one.source ?? "", 40)} {oneLine(one.giver ?? "", 40)}
              </span>
              {one.comment && <Text text={one.comment} lines={4} label="the comment" />}
            </div>
          ))}
        </section>
      )}
      {turn && mark && (
        <section class="card">
          <h2>Turn {turn.n}</h2>
          <dl class="facts">
            <dt>version</dt>
            <dd>
              <Version id={turn.model} />
            </dd>
            {turn.seams.map((seam) => (
              <div key={seam.at} style={{ display: "contents" }}>
                <dt>from token {seam.at}</dt>
                <dd>
                  <Version id={seam.model} />
                </dd>
              </div>
            ))}
            <dt>call</dt>
            <dd class="mono">{oneLine(turn.call_id)}</dd>
            <dt>API</dt>
            <dd>{oneLine(turn.api)}</dd>
            <dt>tokens</dt>
            <dd>
              {number(turn.prompt_tokens)} read, {number(turn.sampled_tokens)} sampled
            </dd>
            <dt>seconds</dt>
            <dd>
              {seconds(turn.seconds)}, {seconds(mark.at ?? 0)} after the start
            </dd>
            <dt>ended by</dt>
            <dd>{oneLine(turn.finish_reason ?? "–")}</dd>
            {Object.entries(turn.sampling)
              .slice(0, 30)
              .map(([name, value]) => (
                <div key={name} style={{ display: "contents" }}>
                  <dt>{oneLine(name, 40)}</dt>
                  <dd>{oneLine(JSON.stringify(value) ?? "", 200)}</dd>
                </div>
              ))}
          </dl>
          {turn.tools && turn.tools.length > 0 && (
            <details>
              <summary>{turn.tools.length} tools defined</summary>
              <ul>
                {turn.tools.slice(0, 100).map((tool, n) => (
                  <li key={n}>{oneLine(String((tool as { function?: { name?: unknown } }).function?.name ?? "?"), 80)}</li>
                ))}
              </ul>
            </details>
          )}
        </section>
      )}
    </aside>
  );
}
