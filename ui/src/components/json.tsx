/** JSON tree: a value whose objects and lists unfold; nothing of a folded one is in the page. */
import { useState } from "preact/hooks";
import { isLongNumber, parseJson } from "../lib/exact_json";
import { oneLine } from "../lib/format";
import { Text } from "./text";

const STEP = 100; // entries more at each click

/** Return the value that a text holds as JSON, or undefined. */
export function parsed(text: string): unknown {
  if (!/^\s*[[{]/.test(text) || text.length > 2_000_000) return undefined;
  try {
    return parseJson(text);
  } catch {
    return undefined;
  }
}

export function Json({ value, name, open = false }: { value: unknown; name?: string; open?: boolean }) {
  const [isOpen, setOpen] = useState(open);
  const [limit, setLimit] = useState(STEP);
  const label = name === undefined ? null : <span class="name">{oneLine(name)}: </span>;
  if (!isFolded(value)) {
    const text = typeof value === "string" ? value : JSON.stringify(value);
    return (
      <div class="json leaf">
        {label}
        {typeof value === "string" && (text.length > 200 || text.includes("\n")) ? (
          <Text text={text} lines={12} characters={1500} />
        ) : (
          <span class={typeof value} dir="auto">
            {oneLine(text ?? "undefined", 400)}
          </span>
        )}
      </div>
    );
  }
  const entries: [string, unknown][] = Array.isArray(value)
    ? value.map((one, n) => [String(n), one])
    : Object.entries(value as object);
  return (
    <div class="json">
      <button class="fold" aria-expanded={isOpen} onClick={() => setOpen(!isOpen)}>
        {isOpen ? "▾ " : "▸ "}
        {label}
        {Array.isArray(value) ? `[${entries.length}]` : `{${entries.length}}`}
        {!isOpen && <span class="hint"> {oneLine(summary(entries), 80)}</span>}
      </button>
      {isOpen && (
        <div class="inner">
          {entries.slice(0, limit).map(([key, one]) => (
            <Json key={key} name={key} value={one} />
          ))}
          {entries.length > limit && (
            <button class="more" onClick={() => setLimit(limit + STEP)}>
              {entries.length - limit} more
            </button>
          )}
        </div>
      )}
    </div>
  );
}

function isFolded(value: unknown): boolean {
  return typeof value === "object" && value !== null && !isLongNumber(value);
}

function summary(entries: [string, unknown][]): string {
  return entries
    .slice(0, 6)
    .map(([key, one]) => `${key}: ${isFolded(one) ? "…" : (typeof one === "string" ? one : String(JSON.stringify(one))).slice(0, 30)}`)
    .join(", ");
}
