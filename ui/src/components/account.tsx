/** Account: what the platform's devices were held for, and what that cost. */
import { get } from "../lib/api";
import { number, oneLine, percent, seconds } from "../lib/format";
import type { components } from "../lib/openapi";
import { useResource } from "../lib/resource";
import { Loaded } from "./states";

type Table = components["schemas"]["CostTable"];
type Amount = components["schemas"]["CostAmount"];

/** What came of all that was held: docs/operations.md. */
const USES = {
  requests: "answered requests",
  training: "trained",
  idle: "were idle",
  unattributed: "answered what is no stored run",
  asleep: "slept during jobs",
  lost: "trained what was lost",
  other: "started, loaded, saved or waited",
};

/** What was held in this time, and for whom it was not. */
export function Account({ table }: { table: Table }) {
  const whole = devices(table.total, table);
  if (!whole) return <p class="hint">No GPU and no core was held in this time, or nobody wrote it down.</p>;
  const unit = table.total.gpu_seconds ? "GPUs" : "cores";
  const parts = Object.entries(USES).flatMap(([name, about]) => {
    const amount = table.uses[name];
    const held = amount ? devices(amount, table) : 0;
    return held ? [`${percent(held / whole)} ${about}`] : [];
  });
  return (
    <p class="hint">
      Of {seconds(whole)} of {unit}, {parts.join(", ")}.{" "}
      {table.currency ? `All of it cost ${number(table.total.cost)} ${oneLine(table.currency, 3)}` : "What it cost is not known: the section [prices] of cray-agents.toml is empty"}
      {table.unpriced.length > 0 && `, without a price for ${table.unpriced.map((one) => oneLine(one, 60)).join(", ")}`}.
    </p>
  );
}

/** Return seconds of GPUs, or of cores where no GPU was held at all. */
export function devices(amount: Amount, table: Table | undefined): number {
  return table?.total.gpu_seconds ? amount.gpu_seconds : amount.core_seconds;
}

/** Return an amount in words: the time of its devices, and money where there are prices. */
export function costOf(amount: Amount, table: Table): string {
  const time = `${seconds(devices(amount, table))} of a ${table.total.gpu_seconds ? "GPU" : "core"}`;
  return table.currency ? `${number(amount.cost)} ${oneLine(table.currency, 3)} (${time})` : time;
}

/** What a loop took in all, for each success, and for each point of held-out success. */
export function LoopCost({ loop }: { loop: string }) {
  const cost = useResource((signal) => get("/v1/cost", { query: { by: "iteration", loop }, signal }), [loop], ["loop"]);
  return (
    <Loaded of={cost}>
      {(table) => {
        const { spent, per_success, per_point } = table.whole ?? {};
        if (!spent) return <>no time of a device that was written down</>;
        const each = per_success ? `, ${costOf(per_success, table)} for each success` : "";
        return <>{costOf(spent, table) + each + (per_point ? `, ${costOf(per_point, table)} for each point of held-out success` : "")}</>;
      }}
    </Loaded>
  );
}
