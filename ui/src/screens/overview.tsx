/** Overview: the replicas, the queue, loops and jobs, what changed last, and failures that raise no error. */
import { useEffect, useState } from "preact/hooks";
import { JobState } from "../components/chips";
import { CopyAs } from "../components/copy_as";
import { ScreenLink } from "../components/screen_link";
import { Spark } from "../components/spark";
import { Empty, Loaded, NotShown } from "../components/states";
import { get } from "../lib/api";
import { onChange, type Change } from "../lib/events";
import { ago, number, oneLine, percent, seconds } from "../lib/format";
import { useResource } from "../lib/resource";
import { href } from "../lib/route";
import { may } from "../lib/session";

export default function Overview() {
  return (
    <>
      {may("train") && <Warnings />}
      <div class="row">
        <h1>Overview</h1>
        <span class="spacer" />
        <CopyAs cli="cray-agents status" path="/v1/pool" python="await Platform().status()" />
      </div>
      <div class="cards">
        {may("admin") && <Pool />}
        <Queue />
        {may("train") && <Loops />}
        {may("train") && <Jobs />}
        <Changes />
      </div>
    </>
  );
}

function Warnings() {
  const warnings = useResource((signal) => get("/v1/health/warnings", { signal }), [], ["run", "loop", "job"]);
  return (
    <div aria-live="polite">
      {warnings.data?.data.map((one) => (
        <p key={one.kind + one.message} class={`banner ${one.level}`}>
          {oneLine(one.message, 300)}{" "}
          {Object.keys(one.query ?? {}).length > 0 && (
            <a href={href(["runs"], one.query as Record<string, string>)}>Show the runs</a>
          )}
        </p>
      ))}
    </div>
  );
}

/** A replica as /v1/pool tells of it. */
interface Replica {
  name?: string;
  state?: string;
  version?: string | null;
  versions?: string[];
  in_flight?: number;
  probe_max_logprob_diff?: number | null;
  error?: string | null;
  [name: string]: unknown;
}

function Pool() {
  const pool = useResource((signal) => get("/v1/pool", { signal }), [], ["pool", "model"]);
  return (
    <section class="card">
      <h2>Replicas</h2>
      <Loaded of={pool}>
        {(data) => {
          const replicas = [...data.data, ...data.spares] as Replica[];
          if (!replicas.length) return <Empty>No replica: no model is served.</Empty>;
          return (
            <ul class="palette">
              {replicas.map((replica, n) => (
                <li key={n}>
                  <ReplicaTile replica={replica} n={n} />
                </li>
              ))}
            </ul>
          );
        }}
      </Loaded>
    </section>
  );
}

function ReplicaTile({ replica, n }: { replica: Replica; n: number }) {
  const good = ["ready", "up", "serving"].includes(String(replica.state));
  const rest = Object.entries(replica).filter(
    ([name, value]) => !["name", "state"].includes(name) && value !== null && value !== "" && value !== 0,
  );
  return (
    <details>
      <summary>
        <b>{oneLine(String(replica.name ?? `replica ${n}`), 40)}</b>{" "}
        <span class={`chip ${good ? "good" : "fair"}`}>{oneLine(String(replica.state ?? "?"), 30)}</span>{" "}
        {oneLine(String(replica.version ?? ""), 60)}
      </summary>
      <dl class="facts">
        {rest.map(([name, value]) => (
          <div key={name} class="row">
            <dt>{oneLine(name, 40)}</dt>
            <dd>{oneLine(typeof value === "string" ? value : JSON.stringify(value), 200)}</dd>
          </div>
        ))}
      </dl>
    </details>
  );
}

function Queue() {
  const queue = useResource((signal) => get("/v1/queue", { signal }), [], ["pool", "run", "batch"]);
  return (
    <section class="card">
      <h2>Queue</h2>
      <Loaded of={queue}>
        {(data) => (
          <>
            <table>
              <thead>
                <tr>
                  <th>requests</th>
                  <th class="number">at the engines</th>
                  <th class="number">waiting</th>
                </tr>
              </thead>
              <tbody>
                {(["interactive", "batch"] as const).map((name) => (
                  <tr key={name}>
                    <td>{name}</td>
                    <td class="number">{number(data[name].inside)}</td>
                    <td class="number">{number(data[name].waiting)}</td>
                  </tr>
                ))}
              </tbody>
            </table>
            <p class="quiet">
              {number(data.capacity)} fit at once, {number(data.remaining)} more would be taken;{" "}
              {seconds(data.mean_seconds)} each.
              {data.parked > 0 && ` ${number(data.parked)} wait for a version that no replica holds.`}
            </p>
            {data.keys.length > 0 && (
              <p>
                {data.keys.slice(0, 5).map((one) => (
                  <span class="chip" key={one.key}>
                    {oneLine(one.name || "this host", 30)} {number(one.waiting)}
                  </span>
                ))}{" "}
                <NotShown count={data.keys.length - 5} what="keys" />
              </p>
            )}
          </>
        )}
      </Loaded>
    </section>
  );
}

function Loops() {
  const loops = useResource((signal) => get("/v1/loops", { query: { limit: 10 }, signal }), [], ["loop"]);
  return (
    <section class="card">
      <h2>Loops</h2>
      <Loaded of={loops}>
        {({ data, has_more }) =>
          data.length === 0 ? (
            <Empty>No loop ran yet. "cray-agents demo" shows one.</Empty>
          ) : (
            <>
            {data.map((loop) => (
              <div key={loop.id}>
                <div class="row">
                  <ScreenLink to={["loop", loop.id]}>{oneLine(loop.id, 40)}</ScreenLink>
                  <span class="spacer" />
                  <span class="quiet">
                    iteration {number(loop.last?.iteration)} · {percent(loop.last?.holdout_success)} held out ·{" "}
                    {ago(loop.updated)}
                  </span>
                </div>
                <Spark values={loop.holdout.map((point) => point.success)} label="held-out success by iteration" />
              </div>
            ))}
            {has_more && <p class="hint">These are the {data.length} that changed last; GET /v1/loops lists all.</p>}
            </>
          )
        }
      </Loaded>
    </section>
  );
}

function Jobs() {
  const jobs = useResource((signal) => get("/v1/jobs", { query: { limit: 8 }, signal }), [], ["job"]);
  return (
    <section class="card">
      <h2>Jobs</h2>
      <Loaded of={jobs}>
        {(answer) => {
          const list = answer.data;
          if (!list.length) return <Empty>No training job yet.</Empty>;
          return (
            <>
            <ul class="palette">
              {list.map((job) => (
                <li key={job.id}>
                  <ScreenLink to={["job", job.id]}>{oneLine(job.id, 40)}</ScreenLink>{" "}
                  <JobState state={job.state} />{" "}
                  <span class="quiet">
                    step {number(job.step)} of {number(job.steps)}
                  </span>
                </li>
              ))}
            </ul>
            {answer.has_more && <p class="hint">These are the newest {list.length}: "cray-agents jobs list" lists all.</p>}
            </>
          );
        }}
      </Loaded>
    </section>
  );
}

const SCREEN_OF: Record<string, string> = { run: "run", job: "job", loop: "loop", dataset: "dataset", batch: "batch" };

function Changes() {
  const [list, setList] = useState<(Change & { at: number })[]>([]);
  useEffect(
    () =>
      onChange((change) => {
        if (change.kind === "*") return;
        const entry = { ...change, at: Date.now() / 1000 };
        setList((before) =>
          [entry, ...before.filter((one) => one.kind !== change.kind || one.id !== change.id)].slice(0, 20),
        );
      }),
    [],
  );
  return (
    <section class="card">
      <h2>Changes</h2>
      {list.length === 0 ? (
        <Empty>Nothing changed since this page was opened.</Empty>
      ) : (
        <ul class="palette">
          {list.map((one) => (
            <li key={one.kind + one.id}>
              {one.kind} <SubjectLink change={one} /> {oneLine(one.change, 30)}
            </li>
          ))}
        </ul>
      )}
    </section>
  );
}

function SubjectLink({ change }: { change: Change }) {
  const screen = SCREEN_OF[change.kind];
  const text = oneLine(change.id, 40);
  return screen && change.id ? <ScreenLink to={[screen, change.id]}>{text}</ScreenLink> : <>{text}</>;
}
