/** Exact JSON: whole numbers that a float would round keep their digits, shown and sent. */

interface RawJson {
  rawJSON?: (text: string) => object; // browsers of 2024 and later; others round
  isRawJSON?: (value: unknown) => boolean;
}
const { rawJSON, isRawJSON } = JSON as RawJson;
const LONG = /(?<![.\d])\d{16}/;

/** Parse JSON. A whole number beyond 2^53 becomes an object that JSON.stringify writes as it was. */
export function parseJson(text: string): unknown {
  return rawJSON && LONG.test(text) ? JSON.parse(text, exact) : JSON.parse(text);
}

function exact(_: string, value: unknown, context?: { source?: string }): unknown {
  const source = context?.source;
  const rounded = typeof value === "number" && !Number.isSafeInteger(value) && /^-?\d+$/.test(source ?? "");
  return rounded ? rawJSON!(source!) : value;
}

/** Tell whether a value is such a number. */
export function isLongNumber(value: unknown): boolean {
  return isRawJSON?.(value) ?? false;
}
