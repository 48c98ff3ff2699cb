/** Models: the versions of every name, each under its parent, with the job and dataset that made it; evaluations. */
import { Version } from "../components/chips";
import { CopyAs, quoted } from "../components/copy_as";
import { Facts } from "../components/facts";
import { Json } from "../components/json";
import { ScreenLink } from "../components/screen_link";
import { Empty, Loaded } from "../components/states";
import { Table } from "../components/table";
import { VirtualList } from "../components/virtual_list";
import { get } from "../lib/api";
import { ago, number, oneLine, seconds, time } from "../lib/format";
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
  const chosen = lineage.data?.data.find((one) => one.id === params.get("at"));
  const at = chosen?.id;
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
            <>
            {data.filter((one) => one.promoted).slice(0, 5).map((one) => (
              <p key={one.id} style={{ margin: 0 }}>
                <b><Version id={one.id} /></b> answers now{!one.parent && "; it has no parent here"}
                {ancestors(one, data).map((parent, n) => (
                  <span key={parent}>
                    {n ? " ← " : "; its parents: "}
                    <Version id={parent} />
                  </span>
                ))}
                .
              </p>
            ))}
            {chosen && <Details of={chosen} />}
            <VirtualList
              class="conversation"
              label="Versions"
              count={rows.length}
              estimate={34}
              selected={at ? rows.findIndex(([one]) => one.id === at) : undefined}
              row={(n) => rows[n] && <Row version={rows[n][0]} depth={rows[n][1]} chosen={rows[n][0].id === at} />}
            />
            </>
          );
        }}
      </Loaded>
      <Evaluations />
    </div>
  );
}

/** Return a version's parents, the nearest first. */
function ancestors(version: Ancestry, all: Ancestry[]): string[] {
  const found: string[] = [];
  for (let next = version.parent; next && !found.includes(next) && found.length < 20; ) {
    found.push(next);
    next = all.find((one) => one.id === next)?.parent ?? null;
  }
  return found;
}

/** What made a version, what it measured, and what was decided about it. */
function Details({ of: version }: { of: Ancestry }) {
  return (
    <section class="card" style={{ maxHeight: "45dvh", overflow: "auto", flex: "none" }} tabIndex={0} role="region" aria-label="The chosen version">
      <div class="row">
        <h2>{oneLine(version.id, 80)}</h2>
        {version.promoted && <span class="chip good">promoted</span>}
        <span class="spacer" />
        <CopyAs cli={`cray-agents models show ${quoted(version.id)}`} path={`/v1/models/${encodeURIComponent(version.id)}/lineage`} />
      </div>
      <Facts
        of={[
          ["parent", version.parent ? <Version id={version.parent} /> : "none: its weights were not trained here"],
          ["children", version.children.slice(0, 20).map((one) => <span key={one}><Version id={one} /> </span>)],
          ["job", version.job && <ScreenLink to={["job", version.job]}>{oneLine(version.job, 60)}</ScreenLink>],
          ["dataset", version.dataset && <ScreenLink to={["dataset", version.dataset]}>{oneLine(version.dataset, 60)}</ScreenLink>],
          ["made", time(version.created)],
          ...version.events.map((event): [string, string] => [
            oneLine((event.kind ?? "").replace(/_/g, " "), 30),
            `${ago(event.time)}${event.who && ` by ${oneLine(event.who, 60)}`}${event.reason && `: ${oneLine(event.reason, 300)}`}`,
          ]),
        ]}
      />
      <Json name="metrics" value={version.metrics} />
    </section>
  );
}

/** Success, seconds and cost of what `cray-agents eval` evaluated; nothing where it was never called. */
function Evaluations() {
  const { data } = useResource((signal) => get("/v1/evaluations", { signal }), [], ["run"]);
  if (!data?.data.length) return null;
  return (
    <Table
      label="Evaluations"
      heads={["evaluation", "model", "success", "interval of 95 %", "seconds", "cost of a request"]}
      rows={data.data.map((one: Evaluated) => [
        <ScreenLink to={["runs"]} params={{ q: `loop:${one.loop}` }}>
          {oneLine(one.loop, 80)}
        </ScreenLink>,
        oneLine(one.model, 80),
        number(one.success.value),
        one.success.low == null ? "" : `${number(one.success.low)} to ${number(one.success.high)}`,
        seconds(one.seconds),
        one.cost == null ? "not known" : `${number(Number(one.cost.toPrecision(3)))} ${one.currency}`,
      ])}
    />
  );
}

function Row({ version, depth, chosen }: { version: Ancestry; depth: number; chosen: boolean }) {
  return (
    <div class={`run-row ${chosen ? "selected" : ""}`}>
      <span style={{ paddingLeft: `${Math.min(depth, 20)}rem` }}>
        {depth > 0 && "↳ "}
        {version.promoted ? <b><Version id={version.id} /></b> : <Version id={version.id} />}
      </span>
      <span>{version.promoted && <span class="chip good">promoted</span>}</span>
      <span class="minor">{oneLine(version.method ?? "", 20)}</span>
      <span>{version.job && <ScreenLink to={["job", version.job]}>job</ScreenLink>}</span>
      <span>
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
