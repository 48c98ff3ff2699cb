/** Chips: rewards, tags and versions as small labels. */
import { number, oneLine } from "../lib/format";
import { ScreenLink } from "./screen_link";

export interface NamedValue {
  name: string;
  value: number;
  source?: string;
  turn?: number | null;
}

export function RewardChip({ name, value, source, turn }: NamedValue) {
  const tone = value >= 1 ? "good" : value <= 0 ? "bad" : "fair";
  const of = turn === null || turn === undefined ? "" : ` of turn ${turn + 1}`;
  return (
    <span class={`chip reward ${tone}`} title={`${plainTitle(name)}${of}, given by ${plainTitle(source ?? "")}`}>
      <span class="name" dir="auto">{oneLine(name, 30)}</span> <span>{number(value)}</span>
    </span>
  );
}

export function Tag({ text }: { text: string }) {
  return <span class="chip">{oneLine(text, 40)}</span>;
}

const JOB_TONES: Record<string, string> = { succeeded: "good", failed: "bad", cancelled: "fair" };

export function JobState({ state }: { state: string }) {
  return <span class={`chip ${JOB_TONES[state] ?? ""}`}>{oneLine(state, 20)}</span>;
}

/** The state of a replica: `serving` answers. */
export function ReplicaState({ of: { state = "?" } }: { of: { state?: string } }) {
  return <span class={`chip ${state === "serving" ? "good" : state === "out" ? "bad" : "fair"}`}>{oneLine(state, 30)}</span>;
}

/** What became of an iteration's version; without a comparison nobody decided. */
export function DecisionChip({ record, compared }: { record: { promoted: boolean }; compared: boolean }) {
  if (!compared) return <span class="chip">no candidate compared</span>;
  return <span class={`chip ${record.promoted ? "good" : "bad"}`}>{record.promoted ? "promoted" : "rejected"}</span>;
}

export function Version({ id }: { id: string | null | undefined }) {
  if (!id) return <span class="hint">no version</span>;
  return (
    <ScreenLink to={["models"]} params={{ at: id }}>
      {oneLine(id, 60)}
    </ScreenLink>
  );
}

function plainTitle(text: string): string {
  return oneLine(text, 80);
}
