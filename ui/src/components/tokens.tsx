/** Tokens: the exact tokens of a turn, coloured by a measure. Only rows of tokens in sight are in the page. */
import type { ComponentChildren } from "preact";
import { useMemo } from "preact/hooks";
import { number, plain, signed } from "../lib/format";
import type { components } from "../lib/openapi";
import { Facts } from "./facts";
import { VirtualList } from "./virtual_list";

export type TurnTokens = components["schemas"]["TurnTokens"];
export type TurnScore = components["schemas"]["TurnScore"];
export type Measure = "logprob" | "trainer" | "delta" | "entropy" | "trained" | "advantage";

export const MEASURES: Record<Measure, string> = {
  logprob: "log-probability when sampled",
  trainer: "log-probability by a job's trainer, minus that when sampled",
  delta: "log-probability by an engine now, minus that when sampled",
  entropy: "entropy by an engine now (a lower bound, from its top tokens)",
  trained: "trained on, or masked",
  advantage: "advantage",
};

const MANY = 400; // tokens; more get a list of their own that scrolls
const ROW = 48;
const LIMITS: Record<Measure, number[]> = {
  logprob: [0.1, 0.5, 1, 2, 4],
  trainer: [0.001, 0.01, 0.05, 0.2, 1],
  delta: [0.1, 0.3, 0.7, 1.5, 3],
  entropy: [0.1, 0.5, 1, 1.8, 2.6],
  trained: [],
  advantage: [0.01, 0.3, 0.7, 1.2, 2],
};

function step(value: number, limits: number[]): number {
  let n = 0;
  while (n < limits.length && value >= limits[n]!) n++;
  return n;
}

/** Return the class of a token: its colour says the measure, its index in `tokens` is `n`. */
function tone(props: Pick<TokensProps, "tokens" | "trainer" | "score" | "advantages" | "measure">, n: number): string {
  const { tokens, trainer, score, advantages, measure } = props;
  if (measure === "trained") return tokens.trained[n] ? "trained" : "masked";
  if (measure === "advantage") return tokens.trained[n] ? signedTone(advantages?.[n] ?? 0, LIMITS.advantage) : "masked";
  const logprob = tokens.logprobs[n];
  const sampled = tokens.first + n - tokens.prompt;
  if (sampled < 0) return "prompt";
  if (measure === "logprob") return logprob === null || logprob === undefined ? "" : `heat${step(-logprob, LIMITS.logprob)}`;
  if (measure === "entropy") {
    const entropy = score?.entropy[sampled];
    return entropy === null || entropy === undefined ? "" : `heat${step(entropy, LIMITS.entropy)}`;
  }
  const other = measure === "trainer" ? trainer?.get(tokens.first + n) : score?.logprobs[sampled];
  if (other === null || other === undefined || logprob === null || logprob === undefined) return "";
  return signedTone(other - logprob, LIMITS[measure]);
}

function signedTone(value: number, limits: number[]): string {
  const size = step(Math.abs(value), limits);
  return size === 0 ? "heat0" : `${value > 0 ? "cool" : "heat"}${size}`;
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
  /** The trainer's log-probabilities of tokens, by their place, as far as a job kept them. */
  trainer?: ReadonlyMap<number, number>;
  score?: TurnScore;
  /** Of a training set's sample, of each token. */
  advantages?: readonly (number | null)[];
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
  const { tokens, from, to, chosen } = props;
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
      <span key={n} data-n={n} class={`token ${tone(props, n)}${n === chosen ? " selected" : ""}`}>
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
  const names = ["trainer", "delta", "advantage"].includes(measure) ? ["cool5", "cool3", "cool1", "heat0", "heat1", "heat3", "heat5"] : [0, 1, 2, 3, 4, 5].map((n) => `heat${n}`);
  const ends = {
    logprob: ["certain", "surprising"],
    trainer: ["likelier by the trainer", "less likely"],
    delta: ["likelier by the engine now", "less likely"],
    entropy: ["certain", "open"],
    advantage: ["made likelier", "less likely"],
  }[measure];
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
export function TokenFacts(props: Pick<TokensProps, "tokens" | "trainer" | "score" | "advantages"> & { place: number }) {
  const { tokens, trainer, score, advantages, place } = props;
  const n = place - tokens.first;
  if (n < 0 || n >= tokens.ids.length) return null;
  const sampled = place - tokens.prompt;
  const logprob = tokens.logprobs[n];
  const version = [...tokens.seams].reverse().find((seam) => seam.at <= place)?.model ?? tokens.model;
  const ours = trainer?.get(place);
  const top = sampled >= 0 ? score?.top[sampled] : undefined;
  return (
    <Facts
      of={[
        ["token", <span class="mono">{JSON.stringify(plain(tokens.texts[n]!))}</span>],
        ["id", tokens.ids[n]],
        ["place", `${place} of ${tokens.total} ${sampled >= 0 ? `(sampled ${sampled})` : "(prompt)"}`],
        ["bytes", tokens.bytes[String(n)] && <span class="mono">{hex(tokens.bytes[String(n)]!)}</span>],
        ["logprob", number(logprob) + (logprob == null ? "" : ` (p = ${number(Math.exp(logprob))})`)],
        ["by the trainer", ours !== undefined && number(ours) + (logprob == null ? "" : ` (${signed(ours - logprob)})`)],
        ["version", sampled >= 0 ? plain(version) : "none sampled it"],
        ["trained", (tokens.trained[n] ? "yes" : "no") + (advantages?.[n] == null ? "" : `, with advantage ${number(advantages[n])}`)],
        ...(score && sampled >= 0
          ? ([
              [`under ${plain(score.model)}`, `${number(score.logprobs[sampled])}, entropy ≥ ${number(score.entropy[sampled])}`],
              [
                "likeliest",
                top?.map((one) => (
                  <div key={one.id} class="mono">
                    {one.rank}. {JSON.stringify(plain(one.text))} {number(one.logprob)}
                  </div>
                )),
              ],
            ] as [string, ComponentChildren][])
          : []),
      ]}
    />
  );
}

function hex(base64: string): string {
  return [...atob(base64)].map((character) => character.charCodeAt(0).toString(16).padStart(2, "0")).join(" ");
}
