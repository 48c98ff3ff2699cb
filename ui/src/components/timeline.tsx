/** Timeline: a Chrome trace of an iteration as rows of bars over a common axis of time. */
import { useMemo } from "preact/hooks";
import { number, oneLine, seconds } from "../lib/format";

/** An event of a trace: times are microseconds since its beginning. */
export interface TraceEvent {
  ph: string;
  name: string;
  pid: number;
  tid: number;
  ts?: number;
  dur?: number;
  args?: Record<string, unknown>;
}

interface Bar {
  name: string;
  from: number;
  to: number;
}

interface Lane {
  name: string;
  tone: string;
  bars: Bar[];
}

const [PHASES, JOB, RUNS] = [1, 2, 3]; // the trace's groups of tracks
const MOST_BARS = 200; // of a lane; bars closer to each other than a pixel become one
const ROLLOUTS = "rollouts";
const IDLE = "no call in rollouts";

export function Timeline({ events }: { events: readonly TraceEvent[] }) {
  const { lanes, calls, end, from } = useMemo(() => read(events), [events]);
  if (!lanes.length) return <p class="state">Nothing of this iteration has a time.</p>;
  const share = (time: number) => `${(100 * (time - from)) / Math.max(end - from, 1)}%`;
  return (
    <div class="timeline">
      {lanes.map((lane) => (
        <div class="lane" key={lane.name}>
          <span class="lane-name" title={oneLine(lane.name, 80)}>
            {oneLine(lane.name, 40)}
          </span>
          <div class="track" role="img" aria-label={`${oneLine(lane.name, 80)}: ${told(lane.bars, from)}`}>
            {lane.bars.map((bar, n) => (
              <span
                key={n}
                class={`lane-bar ${lane.tone}`}
                title={`${oneLine(bar.name, 80)}: ${seconds((bar.to - bar.from) / 1e6)}`}
                style={{ left: share(bar.from), width: `max(2px, ${(100 * (bar.to - bar.from)) / Math.max(end - from, 1)}%)` }}
              />
            ))}
          </div>
        </div>
      ))}
      {calls.length > 0 && <InFlight calls={calls} from={from} end={end} />}
      <div class="lane">
        <span class="lane-name" />
        <div class="row quiet">
          <span>0</span>
          <span class="spacer" />
          <span>{seconds((end - from) / 2e6)}</span>
          <span class="spacer" />
          <span>{seconds((end - from) / 1e6)}</span>
        </div>
      </div>
    </div>
  );
}

/** The number of model calls at once, as a filled curve. */
function InFlight({ calls, from, end }: { calls: Bar[]; from: number; end: number }) {
  const [path, most] = useMemo(() => curve(calls, from, end), [calls, from, end]);
  return (
    <div class="lane">
      <span class="lane-name">its calls, at most {number(most)}</span>
      <svg
        class="track in-flight"
        viewBox="0 0 1000 100"
        preserveAspectRatio="none"
        role="img"
        aria-label={`model calls in flight: at most ${number(most)}`}
      >
        <path d={path} />
      </svg>
    </div>
  );
}

function read(events: readonly TraceEvent[]): { lanes: Lane[]; calls: Bar[]; end: number; from: number } {
  const spans = events.filter((one) => one.ph === "X" && one.ts !== undefined);
  const barOf = (one: TraceEvent): Bar => ({ name: one.name, from: one.ts!, to: one.ts! + (one.dur ?? 0) });
  const bars = spans.map(barOf);
  const from = bars.reduce((least, bar) => Math.min(least, bar.from), Infinity);
  const end = bars.reduce((most, bar) => Math.max(most, bar.to), 0);
  const lanes: Lane[] = [];
  for (const phase of spans.filter((one) => one.pid === PHASES && one.tid > 1)) {
    const known = lanes.find((lane) => lane.name === phase.name);
    if (known) known.bars.push(barOf(phase));
    else lanes.push({ name: phase.name, tone: "phase", bars: [barOf(phase)] });
  }
  const job = spans.filter((one) => one.pid === JOB).map(barOf);
  if (job.length) lanes.push({ name: "steps of the job", tone: "job", bars: joined(job, (end - from) / 1000) });
  const calls = spans.filter((one) => one.pid === RUNS && one.name.startsWith("chat ")).map(barOf);
  // runs of the evaluation are not in the trace, so only the rollouts tell when nothing was asked
  const rollouts = lanes.find((lane) => lane.name === ROLLOUTS)?.bars[0];
  const idle = calls.length && rollouts ? gaps(calls, rollouts.from, rollouts.to) : [];
  if (idle.length) lanes.push({ name: IDLE, tone: "idle", bars: joined(idle, (end - from) / 1000) });
  return { lanes, calls, end, from: Number.isFinite(from) ? from : 0 };
}

/** Join bars that are closer than `near`; where many are left, those closer than ever more. */
function joined(bars: Bar[], near: number): Bar[] {
  const sorted = [...bars].sort((one, other) => one.from - other.from);
  for (let least = near; ; least *= 2) {
    const made: Bar[] = [];
    for (const bar of sorted) {
      const last = made.at(-1);
      if (last && bar.from - last.to < least && last.name === bar.name) last.to = Math.max(last.to, bar.to);
      else made.push({ ...bar });
    }
    if (made.length <= MOST_BARS || least > 1e15) return made.slice(0, MOST_BARS);
  }
}

/** The times from `from` to `end` in which no call was in flight. */
function gaps(calls: readonly Bar[], from: number, end: number): Bar[] {
  const made: Bar[] = [];
  let covered = from;
  for (const call of [...calls].sort((one, other) => one.from - other.from)) {
    if (call.from > end) break;
    if (call.from > covered) made.push({ name: IDLE, from: covered, to: call.from });
    covered = Math.max(covered, call.to);
  }
  if (end > covered) made.push({ name: IDLE, from: covered, to: end });
  return made;
}

function curve(calls: readonly Bar[], from: number, end: number): [string, number] {
  const buckets = new Array<number>(400).fill(0);
  const width = Math.max(end - from, 1) / buckets.length;
  for (const call of calls) {
    const last = Math.min(buckets.length - 1, Math.floor((call.to - from) / width));
    for (let n = Math.max(0, Math.floor((call.from - from) / width)); n <= last; n++) buckets[n]! += 1;
  }
  const most = Math.max(...buckets, 1);
  const steps = buckets.map((count, n) => `H${n * 2.5}V${100 - (96 * count) / most}`).join("");
  return [`M0 100${steps}H1000V100Z`, most];
}

function told(bars: readonly Bar[], from: number): string {
  const total = bars.reduce((sum, bar) => sum + bar.to - bar.from, 0);
  return `${seconds(total / 1e6)} from ${seconds(((bars[0]?.from ?? from) - from) / 1e6)}`;
}
