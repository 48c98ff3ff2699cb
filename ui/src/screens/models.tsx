/** Models: the versions of every name, each under its parent, with the job and dataset that made it; evaluations. */
import { CopyAs } from "../components/copy_as";
import { ScreenLink } from "../components/screen_link";
import { Empty, Loaded } from "../components/states";
import { VirtualList } from "../components/virtual_list";
import { get } from "../lib/api";
import { number, oneLine, seconds, time } from "../lib/format";
import type { components } from "../lib/openapi";
import { useResource } from "../lib/resource";
import type { ScreenProps } from ".";

type Ancestry = components["schemas"]["Ancestry"];
type Evaluated = components["schemas"]["EvaluatedModel"];

/** Order versions so that each comes after its parent, with its depth. */
function tree(list: Ancestry[]): [Ancestry, number][] {
  const known = new Set(list.map((one) => one.id));
  const children = new Map<string, Ancestry[]>();
  const roots: Ancestry[] = [];
  for (const one of list) {
    const parent = one.parent;
    if (parent && known.has(parent) && parent !== one.id) children.set(parent, [...(children.get(parent) ?? []), one]);
    else roots.push(one);
  }
  const rows: [Ancestry, number][] = [];
  const waiting: [Ancestry, number][] = [...roots].reverse().map((one) => [one, 0]);
  while (waiting.length) {
    const next = waiting.pop()!;
    rows.push(next);
    for (const child of [...(children.get(next[0].id) ?? [])].reverse()) waiting.push([child, next[1] + 1]);
  }
  return rows;
}

export default function Models({ params }: ScreenProps) {
  const lineage = useResource((signal) => get("/v1/models/lineage", { signal }), [], ["model"]);
  const at = params.get("at");
  return (
    <div style={{ display: "flex", flexDirection: "column", height: "100%", gap: "0.6rem" }}>
      <div class="row">
        <h1>Models</h1>
        <span class="spacer" />
        <CopyAs cli="cray-agents models list" path="/v1/models/lineage" />
      </div>
      <Loaded of={lineage}>
        {({ data }) => {
          const rows = tree(data);
          if (!rows.length) return <Empty>No version is registered.</Empty>;
          return (
            <VirtualList
              class="conversation"
              label="Versions"
              count={rows.length}
              estimate={34}
              selected={at ? rows.findIndex(([one]) => one.id === at) : undefined}
              row={(n) => rows[n] && <Row version={rows[n][0]} depth={rows[n][1]} chosen={rows[n][0].id === at} />}
            />
          );
        }}
      </Loaded>
      <Evaluations />
    </div>
  );
}

/** Success, seconds and cost of what `cray-agents eval` evaluated; nothing where it was never called. */
function Evaluations() {
  const { data } = useResource((signal) => get("/v1/evaluations", { signal }), [], ["run"]);
  if (!data?.data.length) return null;
  return (
    <div class="table-box" tabIndex={0} role="region" aria-label="Evaluations">
      <table>
        <thead>
          <tr>
            {["evaluation", "model", "success", "interval of 95 %", "seconds", "cost of a request"].map((name) => (
              <th key={name}>{name}</th>
            ))}
          </tr>
        </thead>
        <tbody>
          {data.data.map((one: Evaluated) => (
            <tr key={`${one.loop} ${one.model}`}>
              <td>
                <ScreenLink to={["runs"]} params={{ q: `loop:${one.loop}` }}>
                  {oneLine(one.loop, 80)}
                </ScreenLink>
              </td>
              <td>{oneLine(one.model, 80)}</td>
              <td>{number(one.success.value)}</td>
              <td>{one.success.low == null ? "" : `${number(one.success.low)} to ${number(one.success.high)}`}</td>
              <td>{seconds(one.seconds)}</td>
              <td>{one.cost == null ? "not known" : `${number(Number(one.cost.toPrecision(3)))} ${one.currency}`}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function Row({ version, depth, chosen }: { version: Ancestry; depth: number; chosen: boolean }) {
  return (
    <div class={`run-row ${chosen ? "selected" : ""}`}>
      <span style={{ paddingLeft: `${Math.min(depth, 20)}rem` }}>
        {depth > 0 && "↳ "}
        {version.promoted ? <b>{oneLine(version.id, 80)}</b> : oneLine(version.id, 80)}
      </span>
      <span>{version.promoted && <span class="chip good">promoted</span>}</span>
      <span class="minor">{oneLine(version.method ?? "", 20)}</span>
      <span class="minor">{version.job && <ScreenLink to={["job", version.job]}>job</ScreenLink>}</span>
      <span class="minor">
        <ScreenLink to={["runs"]} params={{ q: `model:${version.id}` }}>
          runs
        </ScreenLink>
      </span>
      <span class="minor">
        {oneLine(
          Object.values(version.prompts ?? {})
            .map((hash) => `prompt ${hash}`)
            .join(", "),
          60,
        )}
      </span>
      <span class="minor">{time(version.created)}</span>
    </div>
  );
}
