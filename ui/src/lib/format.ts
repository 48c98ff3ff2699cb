/** Format: numbers, times and texts for people. */

const NUMBER = new Intl.NumberFormat("en", { maximumFractionDigits: 3 });
const COMPACT = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

export const NONE = "–";

export function number(value: number | null | undefined): string {
  if (value === null || value === undefined || Number.isNaN(value)) return NONE;
  if (value !== 0 && Math.abs(value) < 0.001) return value.toExponential(1).replace("e-", "e\u2212"); // no line breaks there
  return Math.abs(value) >= 1e12 ? value.toExponential(2) : NUMBER.format(value);
}

/** Return a measured value with as many digits as are read at a glance; whole numbers have all of theirs. */
export function brief(value: number | null | undefined): string {
  return value === null || value === undefined || Number.isInteger(value) ? number(value) : number(Number(value.toPrecision(5)));
}

/** Return a difference with its sign. */
export function signed(value: number): string {
  return value > 0 ? `+${number(value)}` : number(value);
}

/** Return a value of JSON as a text. */
export function told(value: unknown): string {
  return typeof value === "string" ? value : (JSON.stringify(value) ?? "");
}

/** Return the method of a loop, with that of its jobs where these call it otherwise. */
export function loopMethod(method: string | null | undefined): string {
  return method === "rft" ? "rft (sft on good runs)" : oneLine(method ?? NONE, 30);
}

export function compact(value: number | null | undefined): string {
  return value === null || value === undefined ? NONE : Math.abs(value) < 10_000 ? NUMBER.format(value) : COMPACT.format(value);
}

export function percent(value: number | null | undefined): string {
  return value === null || value === undefined ? NONE : `${NUMBER.format(Math.round(value * 1000) / 10)}\u00a0%`;
}

export function seconds(value: number | null | undefined): string {
  if (value === null || value === undefined) return NONE;
  if (value < 1) return `${Math.round(value * 1000)}\u00a0ms`;
  if (value < 120) return `${value.toFixed(1)}\u00a0s`;
  if (value < 7200) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  return `${Math.floor(value / 3600)} h ${Math.round((value % 3600) / 60)} min`;
}

export function bytes(value: number | null | undefined): string {
  if (value === null || value === undefined) return NONE;
  let rest = value;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (rest < 1024 || unit === "GiB") return `${unit === "B" ? rest : rest.toFixed(1)} ${unit}`;
    rest /= 1024;
  }
  return NONE;
}

/** Return how long a job will take yet, at the pace of its steps; nothing where that is not known. */
export function leftOf(job: { state: string; step?: number; steps?: number; seconds?: number }): string {
  const { step, steps, seconds: spent } = job;
  if (job.state !== "running" || !step || !steps || !spent) return "";
  return `, about ${seconds((spent / step) * (steps - step))} left`;
}

/** Return a unix time in seconds as local date and time. */
export function time(value: number | null | undefined): string {
  if (!value) return NONE;
  const when = new Date(value * 1000);
  const two = (n: number) => String(n).padStart(2, "0");
  const day = `${when.getFullYear()}-${two(when.getMonth() + 1)}-${two(when.getDate())}`;
  return `${day} ${two(when.getHours())}:${two(when.getMinutes())}:${two(when.getSeconds())}`;
}

/** Return the time since a unix time in seconds. */
export function ago(value: number | null | undefined): string {
  return value ? `${seconds(Math.max(0, Date.now() / 1000 - value))} ago` : NONE;
}

// Controls that hide or reorder text: C0 and C1 but for tab and line break, and Unicode's marks of direction.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;

/** Return a stored text with every character that could hide or reorder text made visible. */
export function plain(text: string): string {
  return text.replace(HIDDEN, (character) => {
    const code = character.charCodeAt(0);
    if (code === 13) return "";
    if (code < 32) return String.fromCharCode(0x2400 + code);
    if (code === 127) return "\u2421";
    if (code >= 0xd800 && code <= 0xdfff) return "\ufffd";
    return `\u27e8U+${code.toString(16).toUpperCase().padStart(4, "0")}\u27e9`;
  });
}

/** Return the beginning of a text on one line. */
export function oneLine(text: string, most = 200): string {
  const cut = text.slice(0, most * 2).replace(/\s+/g, " ").trim();
  return plain(cut.length > most ? `${cut.slice(0, most)}…` : cut);
}
