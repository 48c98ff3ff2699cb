/** Filter: the line of text that chooses runs, as `reward<1 and model:calc@3 and "division by zero"`.
 *
 * A line is terms joined by `and` or spaces. A term is `field:value`, a bound such as `seconds>60`, `error` for runs
 * with any error, or words in quotes that are searched in the texts.
 */

export interface Filter {
  query: Record<string, string | number | string[]>;
  /** What is wrong with the line; null if nothing is. */
  problem: string | null;
}

const WORDS = ["loop", "iteration", "agent", "task", "split", "stop_reason", "model", "error", "tag", "text"];
const BOUNDS = ["reward", "seconds", "turns", "tokens", "started"];
const WHOLE = new Set(["turns", "tokens"]);
const TERM = /"((?:[^"\\]|\\.)*)"|(\w+)\s*(<=|>=|<|>|=|:)\s*(?:"((?:[^"\\]|\\.)*)"|(\S+))|(\S+)/g;
const LEAST = 1e-9; // the API's bounds include their value: < and > step by this

export function parseFilter(line: string): Filter {
  const query: Filter["query"] = {};
  const texts: string[] = [];
  let problem: string | null = null;
  for (const match of line.matchAll(TERM)) {
    const [, quotedText, field, sign, quotedValue, bare, word] = match;
    if (quotedText !== undefined) texts.push(unescape(quotedText));
    else if (word !== undefined) {
      if (word === "error") query.error = "*";
      else if (word.toLowerCase() !== "and") texts.push(word);
    } else if (field && sign) {
      const value = quotedValue === undefined ? (bare ?? "") : unescape(quotedValue);
      problem ??= add(query, texts, field, sign, value);
    }
  }
  if (texts.length) query.text = texts.join(" ");
  return { query, problem };
}

function add(query: Filter["query"], texts: string[], field: string, sign: string, value: string): string | null {
  if (BOUNDS.includes(field)) {
    const number = field === "started" ? Date.parse(value) / 1000 : Number(value);
    if (value === "" || Number.isNaN(number)) return `${field}${sign}${value}: "${value}" is no ${field === "started" ? "date" : "number"}`;
    const step = WHOLE.has(field) ? 1 : LEAST;
    const [least, most] = field === "started" ? ["since", "until"] : [`min_${field}`, `max_${field}`];
    if (sign !== "<" && sign !== "<=") query[least] = sign === ">" ? number + step : number;
    if (sign !== ">" && sign !== ">=") query[most] = sign === "<" ? number - step : number;
    return null;
  }
  if (!WORDS.includes(field)) return `"${field}" is no field: there are ${[...WORDS, ...BOUNDS].join(", ")}`;
  if (sign !== ":" && sign !== "=") return `${field} has no order: write ${field}:${value}`;
  if (field === "text") texts.push(value);
  else if (field === "tag") query.tag = [...((query.tag as string[] | undefined) ?? []), value];
  else query[field] = value;
  return null;
}

/** Return the line with this term in the place of every other of its field and sign; null takes them out. */
export function withTerm(line: string, field: string, term: string | null): string {
  const kept: string[] = [];
  for (const match of line.matchAll(TERM)) {
    if (match[2] === field || match[6]?.toLowerCase() === "and") continue;
    if (field === "error" && match[6] === "error") continue;
    kept.push(match[0]);
  }
  if (term) kept.push(term);
  return kept.join(" and ");
}

/** Return a term that a line can hold. */
export function term(field: string, value: string): string {
  return /^[^\s"]+$/.test(value) ? `${field}:${value}` : `${field}:"${value.replace(/(["\\])/g, "\\$1")}"`;
}

function unescape(text: string): string {
  return text.replace(/\\(.)/g, "$1");
}

/** Return the option `--where` of `cray-agents runs` for a query; nothing for an empty one. */
export function asOptions(query: Filter["query"]): string {
  const terms = Object.entries(query).flatMap(([name, value]) =>
    (Array.isArray(value) ? value : [value]).map((one) => {
      const date = name === "since" || name === "until";
      const text = date ? new Date(Number(one) * 1000).toISOString() : String(one);
      const word = /^[^\s"]+$/.test(text) ? text : `"${text.replace(/"/g, "")}"`;
      const bound = /^(min|max)_(.+)$/.exec(name);
      return bound ? `${bound[2]}${bound[1] === "min" ? ">=" : "<="}${word}` : `${name}=${word}`;
    }),
  );
  return terms.length ? `--where '${terms.join(" ").replace(/'/g, "'\\''")}'` : "";
}
