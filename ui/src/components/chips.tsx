/** Chips: rewards, tags and versions as small labels. */
import { number, oneLine } from "../lib/format";
import { href } from "../lib/route";

export interface NamedValue {
  name: string;
  value: number;
  source?: string;
  turn?: number | null;
}

export function RewardChip({ name, value, source, turn }: NamedValue) {
  const tone = value >= 1 ? "good" : value <= 0 ? "bad" : "fair";
  const of = turn === null || turn === undefined ? "" : ` of turn ${turn}`;
  return (
    <span class={`chip reward ${tone}`} title={`${plainTitle(name)}${of}, given by ${plainTitle(source ?? "")}`}>
      {oneLine(name, 30)} {number(value)}
    </span>
  );
}

export function Tag({ text }: { text: string }) {
  return <span class="chip">{oneLine(text, 40)}</span>;
}

export function Version({ id }: { id: string | null | undefined }) {
  return id ? <a href={href(["models"], { at: id })}>{oneLine(id, 60)}</a> : <span class="hint">no version</span>;
}

function plainTitle(text: string): string {
  return oneLine(text, 80);
}
