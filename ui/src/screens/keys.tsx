/** Keys: the API keys with their roles and last use, and what each used over time and cost. */
import { useState } from "preact/hooks";
import { Account, devices } from "../components/account";
import { Action } from "../components/action";
import { Chart } from "../components/chart";
import { CopyAs, quoted } from "../components/copy_as";
import { Dialog } from "../components/dialog";
import { Empty, Loaded } from "../components/states";
import { Head, sorted, type Sort } from "../components/table";
import { address, del, get, post } from "../lib/api";
import { ago, compact, number, oneLine, seconds, time } from "../lib/format";
import { useKeys } from "../lib/keyboard";
import type { components } from "../lib/openapi";
import { wholeOf } from "../lib/pages";
import { useResource } from "../lib/resource";
import { setParams } from "../lib/route";
import { caller, features, may, type RoleName } from "../lib/session";
import type { ScreenProps } from ".";

type Known = components["schemas"]["ShownKey"];
type Usage = components["schemas"]["UsageRow"];
type Table = components["schemas"]["CostTable"];
type Cost = components["schemas"]["CostRow"];

const DAY = 86_400;
/** Requests without a key, in the address and in a question: an empty parameter is none. */
const NO_KEY = "none";
/** Spans of time: their seconds, and the bucket that their curves are divided by. */
const SPANS: Record<string, [number, string]> = { day: [DAY, "1h"], week: [7 * DAY, "1d"], quarter: [91 * DAY, "1d"] };
const ROLES: Record<RoleName, string> = {
  use: "call models",
  train: "... and train them",
  admin: "everything",
};

const HEADS = ["key", "role", "state", "last use"];
const FIGURES = ["runs", "errors", "tokens in", "out"];

/** A key that was made, or a name under which the platform itself counts; with its usage and cost. */
interface Line {
  id: string;
  name: string;
  known: Known | undefined;
  usage: Usage | undefined;
  cost: Cost | undefined;
}

export default function Keys({ params }: ScreenProps) {
  const span = SPANS[params.get("span") ?? ""] ? params.get("span")! : "week";
  const [length, bucket] = SPANS[span]!;
  const named = params.get("key");
  const chosen = named === NO_KEY ? "" : named;
  const since = Math.floor((Date.now() / 1000 - length) / 3600) * 3600;
  const deps = [span, may("admin")];
  const known = useResource(
    async (signal) =>
      may("admin") ? (await wholeOf((after) => get("/v1/keys", { query: { limit: 1000, after }, signal }))).data : [],
    deps,
    ["key"],
  );
  const used = useResource(
    (signal) => get("/v1/usage", { query: { by: "key", since }, signal }),
    deps,
    ["run"],
  );
  const costs = useResource((signal) => wholeOf((after) => get("/v1/cost", { query: { by: "key", since, after }, signal })), deps);
  const curves = useResource(
    (signal) => {
      const query = { by: "key", since, bucket, ...(chosen === null ? {} : { key: chosen || NO_KEY }) } as const;
      return wholeOf((after) => get("/v1/cost", { query: { ...query, after }, signal }));
    },
    [...deps, chosen],
  );
  const [making, setMaking] = useState(false);
  const [ending, setEnding] = useState<Known | null>(null);
  const [secret, setSecret] = useState<components["schemas"]["NewKey"] | null>(null);
  const [rows, sort] = sorted(
    lines(known.data ?? [], used.data?.data ?? [], costs.data?.data ?? []),
    {
      key: (one) => one.name,
      role: (one) => one.known?.role,
      "last use": (one) => one.usage?.last,
      runs: (one) => one.usage?.runs ?? 0,
      errors: (one) => one.usage?.errors ?? 0,
      "tokens in": (one) => one.usage?.prompt_tokens ?? 0,
      out: (one) => one.usage?.sampled_tokens ?? 0,
      [heldTime(costs.data)]: (one) => one.cost && devices(one.cost.spent, costs.data),
      made: (one) => one.known?.created,
      ...(costs.data?.currency && { [oneLine(costs.data.currency, 3)]: (one: Line) => one.cost?.spent.cost }),
    },
    !used.data?.has_more,
  );
  const at = rows.findIndex((row) => row.id === chosen);
  const choose = (id: string) => setParams({ key: id || NO_KEY });
  const select = (n: number) => rows[n] && choose(rows[n].id);
  useKeys({
    j: ["next key", () => select(Math.min(rows.length - 1, at + 1))],
    k: ["previous key", () => select(Math.max(0, at - 1))],
  });
  return (
    <>
      <div class="row">
        <h1>Keys and usage</h1>
        <label class="row">
          the last{" "}
          <select value={span} onChange={(event) => setParams({ span: event.currentTarget.value })}>
            {Object.keys(SPANS).map((one) => (
              <option key={one}>{one}</option>
            ))}
          </select>
        </label>
        <span class="spacer" />
        {may("admin") && (
          <button class="primary" onClick={() => setMaking(true)}>
            Create a key
          </button>
        )}
        <CopyAs
          cli={may("admin") ? `cray-agents usage cost --by key --since ${length / DAY}d` : undefined}
          python={`await Platform().views.usage("key", since=${since})`}
          path={address("/v1/usage", {}, { by: "key", since })}
        />
      </div>
      <div class="section">
        {!may("admin") && (
          <p class="quiet" style={{ margin: 0 }}>
            This is the use of your own key, <b>{oneLine(caller.value?.name ?? "", 60)}</b> ({caller.value?.role}). Keys of the role admin see all.
          </p>
        )}
        <section class="card wide">
          <h2>{may("admin") ? "Keys" : "Your key"}</h2>
          <Loaded of={used}>
            {({ has_more }) => (
              <Loaded of={known}>
                {() => (
                  <>
                    <List rows={rows} chosen={chosen} table={costs.data} select={choose} end={setEnding} sort={sort} />
                    {has_more && <p class="hint">What the keys that used least used is not counted here.</p>}
                  </>
                )}
              </Loaded>
            )}
          </Loaded>
        </section>
        <section class="card wide">
          <div class="row">
            <h2>{chosen === null ? "All of it, over time" : `${label(rows[at]?.name ?? chosen, chosen)}, over time`}</h2>
            {chosen !== null && <button onClick={() => setParams({ key: null })}>All keys</button>}
          </div>
          <Loaded of={curves}>{(table) => <Curves table={table} />}</Loaded>
        </section>
      </div>
      {making && <Create close={() => setMaking(false)} done={(key) => (setSecret(key), known.reload())} />}
      {ending && (
        <Action
          title="Revoke the key"
          danger
          needsReason
          cli={(reason) => `cray-agents keys revoke ${quoted(ending.id)} --reason ${quoted(reason)}`}
          act={(reason) => del("/v1/keys/{key}", { path: { key: ending.id }, reason }).then(known.reload)}
          close={() => setEnding(null)}
        >
          <p style={{ margin: 0 }}>
            <b>{oneLine(ending.name, 60)}</b> stops working within a second, for good. What it used stays on record.
          </p>
        </Action>
      )}
      {secret && <Secret made={secret} close={() => setSecret(null)} />}
    </>
  );
}

function List(props: {
  rows: readonly Line[];
  chosen: string | null;
  table: Table | undefined;
  select: (id: string) => void;
  end: (key: Known) => void;
  sort: Sort | undefined;
}) {
  const { rows, table } = props;
  if (!rows.length) return <Empty>{may("admin") ? "No key was made, and nothing was asked." : "Nothing was asked in this time."}</Empty>;
  return (
    <>
      <div class="table-box" tabIndex={0} role="region" aria-label="Keys">
        <table>
          <thead>
            <tr>
              {HEADS.map((name) => (
                <Head key={name} name={name} sort={props.sort} />
              ))}
              {[...FIGURES, heldTime(table), ...(table?.currency ? [oneLine(table.currency, 3)] : [])].map((name) => (
                <Head key={name} name={name} sort={props.sort} class="number" />
              ))}
              {may("admin") && <Head name="made" sort={props.sort} />}
              {may("admin") && <th>end it</th>}
            </tr>
          </thead>
          <tbody>
            {rows.map(({ id, name, known, usage, cost }) => (
              <tr key={id} class={id === props.chosen ? "selected" : ""}>
                <td class="wrap">
                  <button aria-pressed={id === props.chosen} onClick={() => props.select(id)}>
                    {label(name, id)}
                  </button>
                </td>
                <td>{known?.role ?? (may("admin") ? "–" : caller.value?.role)}</td>
                <td>{known ? <span class={`chip ${known.revoked ? "bad" : "good"}`}>{known.revoked ? "revoked" : "works"}</span> : "–"}</td>
                <td>{usage ? ago(usage.last) : "not in this time"}</td>
                <td class="number">{number(usage?.runs ?? 0)}</td>
                <td class="number">{number(usage?.errors ?? 0)}</td>
                <td class="number">{compact(usage?.prompt_tokens ?? 0)}</td>
                <td class="number">{compact(usage?.sampled_tokens ?? 0)}</td>
                <td class="number">{cost ? seconds(devices(cost.spent, table)) : "–"}</td>
                {table?.currency && <td class="number">{number(cost?.spent.cost)}</td>}
                {may("admin") && <td style={{ whiteSpace: "nowrap" }}>{time(known?.created)}</td>}
                {may("admin") && (
                  <td>
                    {known && !known.revoked && (
                      <button class="danger" aria-label={`Revoke ${oneLine(name, 60)}`} onClick={() => props.end(known)}>
                        Revoke
                      </button>
                    )}
                  </td>
                )}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {table && <Account table={table} />}
    </>
  );
}

function Curves({ table }: { table: Table }) {
  const curve = (value: (row: Cost) => number): [number, number][] => {
    const sums = new Map<number, number>();
    for (const row of table.data) sums.set(row.time ?? 0, (sums.get(row.time ?? 0) ?? 0) + value(row));
    return [...sums].sort(([a], [b]) => a - b);
  };
  if (!table.data.length) return <Empty>Nothing was asked in this time.</Empty>;
  const by = table.bucket === 3600 ? "an hour" : "a day";
  const unit = table.total.gpu_seconds ? "GPU-seconds" : "core-seconds";
  return (
    <div class="cards">
      <Chart title={`Tokens ${by}`} axis="time" clock points={curve((row) => row.prompt_tokens + row.sampled_tokens)} />
      <Chart title={`Runs ${by}`} axis="time" clock points={curve((row) => row.runs)} />
      <Chart title={`${unit} ${by}`} axis="time" clock points={curve((row) => devices(row.spent, table))} />
      {table.currency && (
        <Chart title={`${oneLine(table.currency, 3)} ${by}`} axis="time" clock points={curve((row) => row.spent.cost ?? 0)} />
      )}
    </div>
  );
}

function Create({ close, done }: { close: () => void; done: (key: components["schemas"]["NewKey"]) => void }) {
  const [name, setName] = useState("");
  const [role, setRole] = useState<RoleName>("use");
  return (
    <Action
      title="Create the key"
      cli={(reason) =>
        `cray-agents keys create ${name ? quoted(name) : "NAME"} --role ${role}${reason ? ` --reason ${quoted(reason)}` : ""}`
      }
      act={async (reason) => done(await post("/v1/keys", { body: { name, role }, reason }))}
      close={close}
    >
      {!features.value.includes("keys") && (
        <p class="banner" style={{ margin: 0 }}>
          No key is asked for yet. From the first one on, every request needs a key, those of this page too: begin with one of the role admin.
        </p>
      )}
      <label>
        Name, as of its user <input required maxLength={100} value={name} onInput={(event) => setName(event.currentTarget.value)} />
      </label>
      <label>
        Role{" "}
        <select value={role} onChange={(event) => setRole(event.currentTarget.value as RoleName)}>
          {(Object.keys(ROLES) as RoleName[]).map((one) => (
            <option key={one} value={one}>
              {one}: {ROLES[one]}
            </option>
          ))}
        </select>
      </label>
    </Action>
  );
}

function Secret({ made, close }: { made: components["schemas"]["NewKey"]; close: () => void }) {
  return (
    <Dialog title={`The key ${oneLine(made.name, 60)}`} close={close}>
      <p>Its secret is kept nowhere. Note it now: it is not shown again.</p>
      <p class="mono" style={{ overflowWrap: "anywhere" }}>
        {made.secret}
      </p>
      <div class="row">
        <button class="primary" onClick={() => void navigator.clipboard.writeText(made.secret)}>
          Copy
        </button>
        <button onClick={close}>Done</button>
      </div>
    </Dialog>
  );
}

/** Join keys with what they used: those that work first, by what they spent. */
function lines(known: Known[], usage: Usage[], costs: Cost[]): Line[] {
  const used = new Map(usage.map((row) => [row.key ?? "", row]));
  const spent = new Map(costs.map((row) => [row.key ?? "", row]));
  const made = new Map(known.map((key) => [key.id, key]));
  const ids = new Set([...made.keys(), ...used.keys()]);
  const rows = [...ids].map((id) => ({
    id,
    name: made.get(id)?.name ?? used.get(id)?.name ?? id,
    known: made.get(id),
    usage: used.get(id),
    cost: spent.get(id),
  }));
  const ended = (row: Line) => Number(row.known?.revoked ?? false);
  const tokens = (row: Line) => (row.usage?.prompt_tokens ?? 0) + (row.usage?.sampled_tokens ?? 0);
  return rows.sort((a, b) => ended(a) - ended(b) || tokens(b) - tokens(a) || a.name.localeCompare(b.name));
}

/** Return the name of the column of the devices' time. */
function heldTime(table: Table | undefined): string {
  return table?.total.gpu_seconds ? "GPU time" : "core time";
}

function label(name: string, id: string): string {
  return id === "" ? "this host, without a key" : oneLine(name || id, 60);
}
