/** Models: the versions of every name, each under its parent, with what made it and what can be decided; evaluations. */
import { useState } from "preact/hooks";
import { Action } from "../components/action";
import { Version } from "../components/chips";
import { CopyAs, quoted } from "../components/copy_as";
import { Facts } from "../components/facts";
import { Json } from "../components/json";
import { MessageView } from "../components/message";
import { ScreenLink } from "../components/screen_link";
import { Empty, Loaded } from "../components/states";
import { sorted, Table } from "../components/table";
import { Text } from "../components/text";
import { VirtualList } from "../components/virtual_list";
import { get, post } from "../lib/api";
import { ago, number, oneLine, seconds, time } from "../lib/format";
import type { components } from "../lib/openapi";
import type { Message } from "../lib/records";
import { useResource } from "../lib/resource";
import { may } from "../lib/session";
import type { ScreenProps } from ".";

type Ancestry = components["schemas"]["Ancestry"];

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
            {chosen && <Details key={chosen.id} of={chosen} reload={lineage.reload} />}
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

const DECISIONS = ["promote", "roll back", "reject"] as const;
type Decision = (typeof DECISIONS)[number];

/** What can be decided about a version: the promoted one gives way to the one before, one that served comes back. */
function possible({ promoted, events }: Ancestry): readonly Decision[] {
  if (promoted) return ["roll back"];
  return events.some((one) => one.kind === "promoted" || one.kind === "rolled_back") ? DECISIONS : ["promote", "reject"];
}

function Decide(props: { of: Ancestry; what: Decision; reload: () => void; close: () => void }) {
  const { of: version, what } = props;
  const [name = "", number] = version.id.split("@");
  const back = what === "roll back";
  const to = back && version.promoted ? null : Number(number);
  const command = back ? `rollback ${quoted(name)}${to === null ? "" : ` --to ${to}`}` : `${what} ${quoted(version.id)}`;
  const act = (reason: string) => {
    const sent = { path: { name } as never, reason };
    const why = { reason, who: "", force: false };
    if (back) return post("/v1/models/{name}/rollback", { ...sent, body: { ...why, to } });
    return post(`/v1/models/{name}/${what}`, { ...sent, body: { ...why, version: to } } as never);
  };
  return (
    <Action
      title={back ? (to === null ? `roll back from ${version.id}` : `roll back to ${version.id}`) : `${what} ${version.id}`}
      danger={what !== "promote"}
      cli={(reason) => `cray-agents models ${command}${reason ? ` --reason ${quoted(reason)}` : ""}`}
      act={(reason) => act(reason).then(props.reload)}
      close={props.close}
    >
      <p style={{ margin: 0 }}>
        {what === "reject" ? (
          <>It is noted in the history. What answers stays.</>
        ) : (
          <>
            {to === null ? `What was promoted before ${version.id}` : version.id} answers whoever asks for <b>{name}</b>, as soon as the
            replicas hold it and it passes its logprob check. No request is lost.
          </>
        )}
      </p>
    </Action>
  );
}

/** What made a version, what it measured, and what was decided about it. */
function Details({ of: version, reload }: { of: Ancestry; reload: () => void }) {
  const [what, decide] = useState<Decision | null>(null);
  return (
    <section class="card" style={{ maxHeight: "45dvh", overflow: "auto", flex: "none" }} tabIndex={0} role="region" aria-label="The chosen version">
      <div class="row">
        <h2>{oneLine(version.id, 80)}</h2>
        {version.promoted && <span class="chip good">promoted</span>}
        <span class="spacer" />
        {may("admin") &&
          DECISIONS.map((one) => (
            <button
              key={one}
              class={one === "promote" ? "" : "danger"}
              disabled={!possible(version).includes(one)}
              onClick={() => decide(one)}
            >
              {one === "roll back" && !version.promoted ? "roll back to it" : one}
            </button>
          ))}
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
      {Object.keys(version.prompts ?? {}).length > 0 && <Prompts of={version} />}
      {what && <Decide of={version} what={what} reload={reload} close={() => decide(null)} />}
    </section>
  );
}

/** The prompts that a version was given beside its weights, whole. */
function Prompts({ of: { id } }: { of: Ancestry }) {
  const name = id.split("@")[0] ?? "";
  const versions = useResource((signal) => get("/v1/models/{name}/versions", { path: { name }, signal }), [name]);
  return (
    <Loaded of={versions}>
      {({ data }) =>
        Object.entries(data.find((one) => one.id === id)?.prompts ?? {}).map(([agent, prompt]) => (
          <section key={agent} aria-label={`The prompt of ${oneLine(agent, 60)}`}>
            <h3>The prompt of {oneLine(agent, 60)}</h3>
            {prompt.instructions == null ? (
              <p class="hint">Its instructions are those of the agent's own function.</p>
            ) : (
              <Text text={prompt.instructions} label="the instructions" />
            )}
            {prompt.examples?.map((message, n) => <MessageView key={n} message={message as unknown as Message} />)}
            <Facts of={Object.entries(prompt.tools ?? {}).map(([tool, text]) => [`tool ${oneLine(tool, 60)}`, <Text text={text} />])} />
          </section>
        ))
      }
    </Loaded>
  );
}

/** Success, seconds and cost of what `cray-agents eval` evaluated; nothing where it was never called. */
function Evaluations() {
  const { data } = useResource((signal) => get("/v1/evaluations", { signal }), [], ["run"]);
  if (!data?.data.length) return null;
  const [rows, sort] = sorted(
    data.data,
    {
      evaluation: (one) => one.loop,
      model: (one) => one.model,
      success: (one) => one.success.value,
      seconds: (one) => one.seconds,
      "cost of a request": (one) => one.cost,
    },
    true,
  );
  return (
    <Table
      label="Evaluations"
      sort={sort}
      heads={["evaluation", "model", "success", "interval of 95 %", "seconds", "cost of a request"]}
      rows={rows.map((one) => [
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
      <span class="whole" style={{ paddingLeft: `min(${depth}rem, 25%)` }}>
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
