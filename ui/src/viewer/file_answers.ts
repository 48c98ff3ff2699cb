/** File answers: what the gateway would answer about the runs in this file, from the file itself.
 *
 * cray_agents/runtime/exports/formats/html.py writes it. Each run is a script of JSON with its facts. Its other parts
 * are gzip in base64, each in a script whose id is RUN/outline, RUN/tokens or RUN/0, RUN/1, ... for its turns, and are
 * unpacked when they are shown.
 */
import { ApiError, type AnySent } from "../lib/api";
import { parseJson } from "../lib/exact_json";
import type { components } from "../lib/openapi";
import type { RunFacts } from "../lib/records";

type Schemas = components["schemas"];
type Outline = Schemas["RunOutline"];

/** A run in the file: `included` of its turns are here, in parts of `window` turns. */
export interface FileRun {
  id: string;
  run: RunFacts;
  rewards: Outline["rewards"];
  target: Outline["target"];
  metadata: Outline["metadata"];
  error: Outline["error"];
  turns: number;
  included: number;
  window: number;
  bytes: number;
}

/** The tokens of a turn. Its prompt begins with the first `same` tokens of the turn before, prompt and answer. */
interface PackedTokens {
  model: string;
  same: number;
  prompt: number[];
  ids: number[];
  logprobs: (number | null)[];
  seams: { at: number; model: string }[];
}

interface Part {
  turns: Schemas["ShownTurn"][];
  closing: Schemas["TurnWindow"]["closing"];
  tokens: (PackedTokens | null)[];
}

/** Texts of tokens by id, and the base64 of those that are no whole text. */
interface Vocabulary {
  exact: boolean;
  texts: Record<string, string>;
  bytes: Record<string, string>;
}

interface TokenTexts {
  vocabularies: Vocabulary[];
  /** By version: the index of its vocabulary, or why it has none. */
  models: Record<string, number | string>;
}

/** Take the texts of some scripts out of the page: thousands of nodes would burden it. */
function taken(selector: string): [id: string, text: string][] {
  return [...document.querySelectorAll(selector)].map((one) => {
    one.remove();
    return [one.id, one.textContent ?? ""];
  });
}

export const runs: readonly FileRun[] = taken("script[data-run]").map(([, text]) => parseJson(text) as FileRun);
/** The file was full before all runs were in it. */
export const isFull = taken("script[data-full]").length > 0;
const parts = new Map(taken('script[type="text/plain"]'));

const CACHED = 4; // unpacked parts, each some MB at most but for runs with large texts
const unpacked = new Map<string, Promise<unknown>>();

export async function answerFromFile(method: string, template: string, sent: AnySent): Promise<unknown> {
  const { run_id, number } = (sent.path ?? {}) as { run_id?: string; number?: number };
  const run = runs.find((one) => one.id === run_id);
  if (!run) throw new ApiError(404, "not_found", `The run ${run_id} is not in this file.`);
  const query = (sent.query ?? {}) as { from?: number; limit?: number; prompt?: string };
  const route = method + template.slice("/v1/trajectories/{run_id}".length);
  if (route === "GET/outline") return outlineOf(run);
  if (route === "GET/turns") return windowOf(run, query.from ?? 0, query.limit ?? run.window);
  if (route === "GET/turns/{number}/tokens") return tokensOf(run, Number(number), query.prompt !== "false");
  throw new ApiError(404, "not_found", "This file holds runs, and asks no gateway.");
}

async function outlineOf(run: FileRun): Promise<Outline> {
  const { data } = await part<{ data: Outline["data"] }>(`${run.id}/outline`);
  const { id, rewards, target, metadata, error, bytes, included } = run;
  const marks = { turns: included, data: data.slice(0, included), has_more: false };
  return { id, rewards, target, metadata, error, bytes, run: run.run as never, ...marks };
}

async function windowOf(run: FileRun, from: number, limit: number): Promise<Schemas["TurnWindow"]> {
  const end = Math.min(run.included, from + limit);
  const data: Part["turns"] = [];
  let closing: Part["closing"] = [];
  // a run without turns has one part, of the messages alone
  for (let n = Math.floor(from / run.window); n * run.window < Math.max(1, end); n++) {
    const loaded = await part<Part>(`${run.id}/${n}`);
    data.push(...loaded.turns.filter((turn) => turn.n >= from && turn.n < end));
    closing = loaded.closing;
  }
  return { id: run.id, total: run.included, data, next: end < run.included ? end : null, closing };
}

async function tokensOf(run: FileRun, n: number, withPrompt: boolean): Promise<Schemas["TurnTokens"]> {
  const [{ tokens }, texts] = await Promise.all([
    part<Part>(`${run.id}/${Math.floor(n / run.window)}`),
    part<TokenTexts>(`${run.id}/tokens`),
  ]);
  const at = n % run.window;
  const own = tokens[at];
  if (!own) throw new ApiError(404, "not_found", `The model call of turn ${n} is not recorded.`);
  const prompt = promptOf(tokens, at);
  const which = texts.models[own.model];
  const vocabulary = typeof which === "number" ? texts.vocabularies[which] : { exact: true, texts: {}, bytes: {} };
  if (!vocabulary || (typeof which === "string" && prompt.length + own.ids.length > 0)) {
    throw new ApiError(404, "no_tokenizer", `These tokens have no text here: ${which}`);
  }
  const first = withPrompt ? 0 : prompt.length;
  const ids = withPrompt ? [...prompt, ...own.ids] : own.ids;
  const isSampled = (index: number) => index + first >= prompt.length;
  const bytes: Record<string, string> = {};
  ids.forEach((id, index) => {
    const exact = vocabulary.bytes[id];
    if (exact !== undefined) bytes[index] = exact;
  });
  return {
    id: run.id,
    n,
    model: own.model,
    tokenizer: own.model,
    first,
    prompt: prompt.length,
    total: prompt.length + own.ids.length,
    ids,
    texts: ids.map((id) => vocabulary.texts[id] ?? `<${id}>`),
    bytes,
    logprobs: ids.map((_, index) => (isSampled(index) ? (own.logprobs[index + first - prompt.length] ?? null) : null)),
    trained: ids.map((_, index) => isSampled(index)),
    seams: own.seams.map((seam) => ({ ...seam, at: prompt.length + seam.at })),
    exact: vocabulary.exact,
  };
}

function promptOf(tokens: readonly (PackedTokens | null)[], at: number): number[] {
  let before: number[] = [];
  let prompt: number[] = [];
  for (let n = 0; n <= at; n++) {
    const one = tokens[n];
    if (!one) {
      before = [];
      continue;
    }
    prompt = [...before.slice(0, one.same), ...one.prompt];
    before = [...prompt, ...one.ids];
  }
  return prompt;
}

/** Return a part of the file, unpacked. */
function part<T>(id: string): Promise<T> {
  const known = unpacked.get(id) ?? unpack(id);
  unpacked.delete(id); // the newest use comes last
  unpacked.set(id, known);
  while (unpacked.size > CACHED) unpacked.delete(unpacked.keys().next().value!);
  return known as Promise<T>;
}

async function unpack(id: string): Promise<unknown> {
  const packed = parts.get(id);
  if (!packed) throw new ApiError(404, "not_found", "This part of the file is missing: it was not saved whole.");
  const binary = atob(packed);
  const content = new Uint8Array(binary.length);
  for (let n = 0; n < binary.length; n++) content[n] = binary.charCodeAt(n);
  const stream = new Blob([content]).stream().pipeThrough(new DecompressionStream("gzip"));
  return parseJson(await new Response(stream).text());
}
