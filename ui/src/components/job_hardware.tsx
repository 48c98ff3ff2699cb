/** Job hardware: the nodes of a training job with their devices, curves of one of them, and its slowest rank. */
import type { ComponentChildren } from "preact";
import type { Answer } from "../lib/api";
import { bytes, number, oneLine, percent, seconds, time } from "../lib/format";
import { Chart } from "./chart";
import { Empty, NotShown } from "./states";
import { sorted, Table } from "./table";

type Hardware = Answer<"/v1/jobs/{job_id}/hardware", "get">;
type Node = Hardware["nodes"][number];
type Point = [number, number];

const MOST_CURVES = 48;
/** What a node's devices and ports measure, by the column that adds it up, or has its mean. */
const FIGURES: Record<string, RegExp> = {
  busy: /^gpu.*\.utilization$/,
  power: /^gpu.*\.power_watts$/,
  "ports up": /\.up$/,
  sent: /\.sent_bytes_per_second$/,
  received: /\.received_bytes_per_second$/,
};

/** Sentences on what a job waits for or which of its ranks is slow. */
export function JobNotes({ of: { waits, slowest } }: { of: Hardware }) {
  return (
    <>
      {waits && (
        <p class="banner">
          It waits: {oneLine(waits.meaning, 500)}. Next: {oneLine(waits.next, 500)}.
        </p>
      )}
      <p>
        <b>Slowest rank</b>{" "}
        {slowest
          ? `rank ${slowest.rank} on ${oneLine(slowest.node, 100)}: ${seconds(slowest.seconds)} a step for its own work, ${number(slowest.seconds / slowest.median)} times the median, after step ${slowest.after_step}`
          : "none was named; ranks are compared every 50 steps"}
      </p>
    </>
  );
}

export function JobHardware(props: { of: Hardware; node: string; choose: (node: string) => void }) {
  const { nodes, has_more, slurm } = props.of;
  const chosen = nodes.find((one) => one.node === props.node) ?? nodes[0];
  const [rows, sort] = sorted(
    nodes,
    {
      node: (one) => one.node,
      "last sample": (one) => one.time,
      ...Object.fromEntries(Object.keys(FIGURES).map((name) => [name, (one: Node) => figure(one, name)])),
    },
    !has_more,
  );
  return (
    <>
      <section class="card wide">
        <h2>Nodes</h2>
        {slurm && <p>{slurm.why_unknown ? oneLine(slurm.why_unknown, 300) : account(slurm)}</p>}
        {nodes.length ? (
          <>
            <Table
              label="Nodes"
              heads={["node", "last sample", "GPUs", "busy", "power", "ports up", "sent", "received", "notes"]}
              selected={rows.indexOf(chosen!)}
              sort={sort}
              rows={rows.map((one) => cellsOf(one, one === chosen, () => props.choose(one.node)))}
            />
            {has_more && <p class="hint">These are the first {nodes.length} nodes; cray-agents jobs show --hardware shows all.</p>}
          </>
        ) : (
          <Empty>No node was sampled: the job has not started, or an older release trained it.</Empty>
        )}
      </section>
      {chosen && (
        <NotShown count={Object.keys(chosen.series).length - MOST_CURVES} what="curves" />
      )}
      {chosen &&
        Object.entries(chosen.series)
          .slice(0, MOST_CURVES)
          .map(([name, points]) => (
            <section class="card" key={`${chosen.node} ${name}`}>
              <Chart title={titleOf(chosen.node, name)} axis="time" clock show={/bytes/.test(name) ? bytes : /utilization/.test(name) ? percent : undefined} points={points as Point[]} />
            </section>
          ))}
    </>
  );
}

const UNITS: Record<string, string> = { watts: "W", celsius: "°C", mhz: "MHz" };

/** Return what a curve shows, as in "n1, GPU 0: power, W"; `name` is the sampler's, as in gpu0.power_watts. */
function titleOf(node: string, name: string): string {
  const at = name.lastIndexOf(".");
  const device = name.slice(0, Math.max(0, at)).replace(/^gpu/, "GPU ");
  const [, figure = "", unit] = /^(.*?)(?:_(watts|celsius|mhz|(?:bytes|packets|ticks)(?:_per_second)?))?$/.exec(name.slice(at + 1)) ?? [];
  const measured = unit ? `, ${UNITS[unit] ?? unit.replace("_per_second", "/s")}` : "";
  return oneLine(`${node}${device && device !== "host" ? `, ${device}` : ""}: ${figure.replace(/_/g, " ")}${measured}`, 100);
}

function cellsOf(node: Node, selected: boolean, choose: () => void): ComponentChildren[] {
  const [busy, watts, up, sent, received] = Object.keys(FIGURES).map((name) => figure(node, name));
  const notes = Object.entries(node.newest).filter(
    ([name, value]) => typeof value === "string" || (/:\d+\./.test(name) && !/\.up$|_per_second$/.test(name)),
  );
  const kinds = [...new Set(node.gpus.map((gpu) => String(gpu.name)))];
  return [
    <button aria-pressed={selected} onClick={choose}>
      {oneLine(node.node, 100)}
    </button>,
    time(node.time),
    node.gpus.length ? `${node.gpus.length} × ${oneLine(kinds.join(", "), 100)}` : "no data",
    busy == null ? "no data" : percent(busy),
    watts == null ? "no data" : `${number(watts)} W`,
    up == null ? "no data" : `${up} of ${figures(node, "ports up").length}`,
    sent == null ? "no data" : `${bytes(sent)}/s`,
    received == null ? "no data" : `${bytes(received)}/s`,
    oneLine(notes.map(([name, value]) => `${name} ${value}`).join("; "), 300),
  ];
}

function account(slurm: NonNullable<Hardware["slurm"]>): string {
  const facts = [
    slurm.cpu_seconds == null ? "" : `${seconds(slurm.cpu_seconds)} of CPU time`,
    slurm.memory_bytes == null ? "" : `${bytes(slurm.memory_bytes)} at most in a task`,
    slurm.joules == null ? "" : `${number(slurm.joules)} J of its nodes`,
  ].filter(Boolean);
  return `By Slurm's account: ${facts.join(", ") || "nothing known"}.`;
}

function figures(node: Node, column: string): number[] {
  return Object.entries(node.newest).flatMap(([key, value]) => (FIGURES[column]!.test(key) && typeof value === "number" ? [value] : []));
}

/** Return what a column shows of a node; null where nothing measured it. */
function figure(node: Node, column: string): number | null {
  const values = figures(node, column);
  const total = values.reduce((sum, value) => sum + value, 0);
  return values.length ? total / (column === "busy" ? values.length : 1) : null;
}
