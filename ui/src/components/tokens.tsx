/** Tokens: the exact tokens of a turn, coloured by a measure. Only rows of tokens in sight are in the page. */
import { useMemo } from "preact/hooks";
import { number, plain } from "../lib/format";
import type { components } from "../lib/openapi";
import { VirtualList } from "./virtual_list";

export type TurnTokens = components["schemas"]["TurnTokens"];
export type TurnScore = components["schemas"]["TurnScore"];
export type Measure = "logprob" | "delta" | "entropy" | "trained";

export const MEASURES: Record<Measure, string> = {
  logprob: "log-probability when sampled",
  delta: "difference under another version",
  entropy: "entropy under another version (a lower bound, from its top tokens)",
  trained: "trained on, or masked",
};

const MANY = 400; // tokens; more get a list of their own that scrolls
const ROW = 48;
const LIMITS: Record<Measure, number[]> = {
  logprob: [0.1, 0.5, 1, 2, 4],
  delta: [0.1, 0.3, 0.7, 1.5, 3],
  entropy: [0.1, 0.5, 1, 1.8, 2.6],
  trained: [],
};

function step(value: number, limits: number[]): number {
  let n = 0;
  while (n < limits.length && value >= limits[n]!) n++;
  return n;
}

/** Return the class of a token: its colour says the measure, its index in `tokens` is `n`. */
function tone(tokens: TurnTokens, score: TurnScore | undefined, measure: Measure, n: number): string {
  if (measure === "trained") return tokens.trained[n] ? "trained" : "masked";
  const logprob = tokens.logprobs[n];
  const sampled = tokens.first + n - tokens.prompt;
  if (sampled < 0) return "prompt";
  if (measure === "logprob") return logprob === null || logprob === undefined ? "" : `heat${step(-logprob, LIMITS.logprob)}`;
  if (measure === "entropy") {
    const entropy = score?.entropy[sampled];
    return entropy === null || entropy === undefined ? "" : `heat${step(entropy, LIMITS.entropy)}`;
  }
  const other = score?.logprobs[sampled];
  if (other === null || other === undefined || logprob === null || logprob === undefined) return "";
  const difference = other - logprob;
  const size = step(Math.abs(difference), LIMITS.delta);
  return size === 0 ? "heat0" : `${difference > 0 ? "cool" : "heat"}${size}`;
}

/** Cut the tokens into rows, at the ends of lines where there are any. */
function rowsOf(texts: readonly string[]): [number, number][] {
  const rows: [number, number][] = [];
  let start = 0;
  for (let n = 0; n < texts.length; n++) {
    const long = n - start + 1;
    if (long >= ROW * 3 || (long >= ROW && texts[n]!.includes("\n")) || n === texts.length - 1) {
      rows.push([start, n + 1]);
      start = n + 1;
    }
  }
  return rows;
}

export interface TokensProps {
  tokens: TurnTokens;
  score?: TurnScore;
  measure: Measure;
  /** The chosen token, as its place in the whole list. */
  selected: number | null;
  onSelect: (place: number) => void;
}

export function Tokens(props: TokensProps) {
  const { tokens, selected, onSelect } = props;
  const rows = useMemo(() => rowsOf(tokens.texts), [tokens]);
  const chosen = selected === null ? -1 : selected - tokens.first;
  const onClick = (event: MouseEvent) => {
    const place = (event.target as HTMLElement).dataset.n;
    if (place !== undefined) onSelect(Number(place) + tokens.first);
  };
  if (!tokens.ids.length) return <p class="hint">No tokens are recorded for this turn.</p>;
  if (tokens.ids.length <= MANY) {
    return (
      <div class="tokens" onClick={onClick}>
        <TokenRow {...props} from={0} to={tokens.ids.length} chosen={chosen} />
      </div>
    );
  }
  return (
    <div class="tokens long" onClick={onClick}>
      <VirtualList
        label={`${number(tokens.ids.length)} tokens`}
        count={rows.length}
        estimate={60}
        selected={chosen < 0 ? undefined : rows.findIndex(([from, to]) => chosen >= from && chosen < to)}
        row={(n) => rows[n] && <TokenRow {...props} from={rows[n][0]} to={rows[n][1]} chosen={chosen} />}
      />
    </div>
  );
}

function TokenRow(props: TokensProps & { from: number; to: number; chosen: number }) {
  const { tokens, score, measure, from, to, chosen } = props;
  const seams = new Map(tokens.seams.map((seam) => [seam.at - tokens.first, seam.model]));
  const made = [];
  for (let n = from; n < to; n++) {
    const seam = seams.get(n);
    if (seam !== undefined) {
      made.push(
        <span key={`s${n}`} class="seam">
          {plain(seam)}
        </span>,
      );
    }
    made.push(
      <span key={n} data-n={n} class={`token ${tone(tokens, score, measure, n)}${n === chosen ? " selected" : ""}`}>
        {visible(tokens.texts[n]!)}
      </span>,
    );
  }
  return <>{made}</>;
}

/** Return the text of a token; one that would not be seen gets a mark. */
function visible(text: string): string {
  if (text === "") return "∅";
  return plain(text).replace(/\n/g, "⏎\n").replace(/\t/g, "⇥\t");
}

export function Legend({ measure }: { measure: Measure }) {
  if (measure === "trained") {
    return (
      <span class="legend tokens">
        <span class="token trained">trained on</span> <span class="token masked">masked</span>
      </span>
    );
  }
  const names = measure === "delta" ? ["cool5", "cool3", "cool1", "heat0", "heat1", "heat3", "heat5"] : [0, 1, 2, 3, 4, 5].map((n) => `heat${n}`);
  const ends = { logprob: ["certain", "surprising"], delta: ["likelier now", "less likely now"], entropy: ["certain", "open"] }[measure];
  return (
    <span class="legend">
      {ends[0]}
      {names.map((name) => (
        <i key={name} class={name} />
      ))}
      {ends[1]}
    </span>
  );
}

/** The facts of one token. */
export function TokenFacts({ tokens, score, place }: { tokens: TurnTokens; score?: TurnScore; place: number }) {
  const n = place - tokens.first;
  if (n < 0 || n >= tokens.ids.length) return null;
  const sampled = place - tokens.prompt;
  const logprob = tokens.logprobs[n];
  const version = [...tokens.seams].reverse().find((seam) => seam.at <= place)?.model ?? tokens.model;
  const top = sampled >= 0 ? score?.top[sampled] : undefined;
  return (
    <dl class="facts">
      <dt>token</dt>
      <dd class="mono">{JSON.stringify(plain(tokens.texts[n]!))}</dd>
      <dt>id</dt>
      <dd>{tokens.ids[n]}</dd>
      <dt>place</dt>
      <dd>
        {place} of {tokens.total} {sampled >= 0 ? `(sampled ${sampled})` : "(prompt)"}
      </dd>
      {tokens.bytes[String(n)] && (
        <>
          <dt>bytes</dt>
          <dd class="mono">{hex(tokens.bytes[String(n)]!)}</dd>
        </>
      )}
      <dt>logprob</dt>
      <dd>
        {number(logprob)}
        {logprob !== null && logprob !== undefined && ` (p = ${number(Math.exp(logprob))})`}
      </dd>
      <dt>version</dt>
      <dd>{sampled >= 0 ? plain(version) : "none sampled it"}</dd>
      <dt>trained</dt>
      <dd>{tokens.trained[n] ? "yes" : "no"}</dd>
      {score && sampled >= 0 && (
        <>
          <dt>under {plain(score.model)}</dt>
          <dd>
            {number(score.logprobs[sampled])}, entropy ≥ {number(score.entropy[sampled])}
          </dd>
          <dt>likeliest</dt>
          <dd>
            {top?.map((one) => (
              <div key={one.id} class="mono">
                {one.rank}. {JSON.stringify(plain(one.text))} {number(one.logprob)}
              </div>
            ))}
          </dd>
        </>
      )}
    </dl>
  );
}

function hex(base64: string): string {
  return [...atob(base64)].map((character) => character.charCodeAt(0).toString(16).padStart(2, "0")).join(" ");
}
