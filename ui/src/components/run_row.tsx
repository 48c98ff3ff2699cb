/** Run row: a run in a list of runs, with the row of the columns' names. */
import { compact, NONE, number, oneLine, seconds, time } from "../lib/format";
import type { RunFacts } from "../lib/records";
import { href } from "../lib/route";
import { RewardChip } from "./chips";
import { THINK } from "./message";

export function RunHead() {
  return (
    <div class="run-row answered run-head" aria-hidden="true">
      <span>input</span>
      <span class="answer">answer</span>
      <span>reward</span>
      <span class="minor">version</span>
      <span class="minor number">turns</span>
      <span class="minor number">tokens</span>
      <span class="minor number">time</span>
      <span class="minor">start, or error</span>
    </div>
  );
}

export function RunRow({ run, selected, marked = false }: { run: RunFacts; selected: boolean; marked?: boolean }) {
  const unknown = run.imported !== null && run.calls === 0; // its calls are not here: no 0
  return (
    <a class={`run-row answered ${selected ? "selected" : ""}`} href={href(["run", run.id])}>
      <span dir="auto">
        {marked && "✓ "}
        {oneLine(run.input, 160) || <span class="hint">{oneLine(run.id)}</span>}
      </span>
      <span class="answer" dir="auto">
        {oneLine((run.output ?? "").replace(THINK, ""), 120) || NONE}
      </span>
      <span class="chips">
        {run.rewards.slice(0, 3).map(([name, source, value, turn], n) => (
          <RewardChip key={n} name={name} source={source} value={value} turn={turn} />
        ))}
        {run.rewards.length > 3 && <span class="hint">+{run.rewards.length - 3}</span>}
        {!run.rewards.length && <span class="hint">none</span>}
      </span>
      <span class="minor">{oneLine(run.model, 60)}</span>
      <span class="minor number">{unknown ? NONE : number(run.turns)}</span>
      <span class="minor number">{unknown ? NONE : compact(run.prompt_tokens + run.sampled_tokens)}</span>
      <span class="minor number">{unknown && !run.seconds ? NONE : seconds(run.seconds)}</span>
      <span class="minor">{run.error ? <span class="error-text">{oneLine(run.error, 60)}</span> : time(run.started)}</span>
    </a>
  );
}
