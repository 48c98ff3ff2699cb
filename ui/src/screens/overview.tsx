/** Overview: is it learning, what was decided last, what runs now and how long yet, are the engines idle, do trainer
 * and sampler agree, what did it cost, and what went wrong. Each leads to its page.
 */
import type { ComponentChildren } from "preact";
import { useEffect, useState } from "preact/hooks";
import { Account, LoopCost } from "../components/account";
import { Agreed } from "../components/agreed";
import { JobState, ReplicaState, Version } from "../components/chips";
import { CopyAs } from "../components/copy_as";
import { chosenLoops, SuccessChart } from "../components/success_chart";
import { ScreenLink } from "../components/screen_link";
import { Empty, Loaded, NotShown } from "../components/states";
import { get, type Answer } from "../lib/api";
import { onChange, type Change } from "../lib/events";
import { ago, leftOf, number, oneLine, percent, seconds } from "../lib/format";
import { useResource, type Resource } from "../lib/resource";
import { may } from "../lib/session";

type Loops = Answer<"/v1/loops", "get">;
type Loop = Loops["data"][number];
type Jobs = Answer<"/v1/jobs", "get">;

const DAY = 86_400; // seconds
const QUIET = 600; // seconds without a new run, after which a loop does not run
const SHOWN = 8; // rows of a list
const DECISIONS: Record<string, string> = { promoted: "good", rejected: "bad", rolled_back: "fair" };

export default function Overview() {
  const train = may("train");
  const loops = useResource(
    async (signal) => (train ? get("/v1/loops", { query: { limit: 20 }, signal }) : { data: [] } as unknown as Loops),
    [train],
    ["loop"],
  );
  const jobs = useResource(
    async (signal) => (train ? get("/v1/jobs", { query: { limit: 20 }, signal }) : { data: [] } as unknown as Jobs),
    [train],
    ["job"],
  );
  return (
    <>
      <div class="row">
        <h1>Overview</h1>
        <span class="spacer" />
        <CopyAs cli="cray-agents status" path="/v1/pool" python="await Platform().status()" />
      </div>
      <div class="cards">
        {train && <Learning loops={loops} />}
        {train && <Decided loops={loops} />}
        {train && <RunsNow loops={loops} jobs={jobs} />}
        <Engines loops={loops} />
        {train && <Agreement jobs={jobs} />}
        <Cost loops={loops} />
        {train && <Wrong />}
        <Changes />
      </div>
    </>
  );
}

function Card(props: { title: string; to?: readonly string[]; page?: string; wide?: boolean; children: ComponentChildren }) {
  return (
    <section class={`card ${props.wide ? "double" : ""}`}>
      <div class="row head">
        <h2>{props.title}</h2>
        <span class="spacer" />
        {props.to && <ScreenLink to={props.to}>{props.page}</ScreenLink>}
      </div>
      {props.children}
    </section>
  );
}

function Learning({ loops }: { loops: Resource<Loops> }) {
  return (
    <Card title="Is it learning?" to={["loop"]} page="all loops" wide>
      <Loaded of={loops}>
        {({ data }) => {
          const [loop, ...controls] = chosenLoops(data);
          if (!loop?.last) return <Empty>No loop has ended an iteration. "cray-agents demo" shows one.</Empty>;
          return (
            <>
              <p>
                <ScreenLink to={["loop", loop.id]}>{oneLine(loop.id, 60)}</ScreenLink>: {verdict(loop)}
              </p>
              <SuccessChart loop={loop} others={controls} />
            </>
          );
        }}
      </Loaded>
    </Card>
  );
}

/** Tell in a sentence what a loop's promotions came to. */
function verdict({ holdout, last, iterations }: Loop): string {
  const promoted = holdout.filter((one) => one.promoted);
  const [first, best] = [promoted[0] ?? holdout[0], promoted.at(-1) ?? holdout.at(-1)];
  const tests = holdout.flatMap((one) => (one.test === null || one.test === undefined ? [] : [one.test]));
  const rose = promoted.length > 1 && best!.success > first!.success;
  const test = tests.length ? ` On test tasks it is ${percent(tests.at(-1))}${tests.length > 1 ? `, from ${percent(tests[0])}` : ""}.` : "";
  const target = last?.target === null || last?.target === undefined ? "" : ` Its target is ${percent(last.target)}.`;
  const said = rose
    ? `yes. Held-out success rose from ${percent(first!.success)} to ${percent(best!.success)}`
    : promoted.length > 1
      ? `not by the numbers. ${promoted.length - 1} candidates were promoted, and held-out success is ${percent(best!.success)}, from ${percent(first!.success)}`
      : `not yet. Held-out success is ${percent(best?.success)}, and no candidate was promoted`;
  return `${said} in ${number(iterations)} iterations.${test}${target}${last?.stopped ? ` It ended itself: ${oneLine(last.stopped, 120)}.` : ""}`;
}

function Decided({ loops }: { loops: Resource<Loops> }) {
  const lineage = useResource((signal) => get("/v1/models/lineage", { signal }), [], ["model"]);
  return (
    <Card title="What was decided last, and why?" to={["models"]} page="all versions">
      <Loaded of={lineage}>
        {({ data }) => {
          const events = data
            .flatMap((one) => one.events.map((event) => ({ ...event, id: one.id })))
            .filter((event) => event.kind in DECISIONS)
            .sort((a, b) => (b.time ?? 0) - (a.time ?? 0) || b.number - a.number);
          const rejected = events.slice(1).find((one) => one.kind === "rejected");
          const shown = events[0]?.kind === "rejected" ? events.slice(0, 1) : [...events.slice(0, 1), ...(rejected ? [rejected] : [])];
          if (!shown.length) return <Empty>Nothing was decided yet.</Empty>;
          return (
            <>
              {shown.map((event) => {
                const loop = loops.data?.data.find((one) => event.who === `loop ${one.id}`);
                const point = loop?.holdout.find((one) => one.version === event.id);
                const { wins, losses } = event.numbers as { wins?: number; losses?: number };
                return (
                  <p key={event.number + event.id}>
                    <span class={`chip ${DECISIONS[event.kind]}`}>{event.kind === "rolled_back" ? "rolled back to" : event.kind}</span> <Version id={event.id} />{" "}
                    {ago(event.time)}
                    {event.who && ` by ${oneLine(event.who, 60)}`}: {oneLine(event.reason || "no reason is on record", 300)}
                    {wins !== undefined && `; it did better at ${number(wins)} held-out tasks and worse at ${number(losses)}`}.{" "}
                    {loop && point && (
                      <ScreenLink to={["iteration", loop.id, String(point.iteration)]}>
                        why: iteration {number(point.iteration)}
                      </ScreenLink>
                    )}
                  </p>
                );
              })}
            </>
          );
        }}
      </Loaded>
    </Card>
  );
}

function RunsNow({ loops, jobs }: { loops: Resource<Loops>; jobs: Resource<Jobs> }) {
  const active = useResource(
    (signal) =>
      get("/v1/trajectories/stats", {
        query: { since: Math.floor(Date.now() / 1000) - DAY, by: "loop", percentiles: "false" } as never,
        signal,
      }),
    [],
    ["run"],
  );
  const now = Date.now() / 1000;
  const running = (loops.data?.data ?? []).filter((loop) => {
    const last = active.data?.data.find((row) => row.loop === loop.id)?.last ?? 0;
    return last > loop.updated && now - last < QUIET && !loop.last?.stopped;
  });
  return (
    <Card title="What runs now, and how long yet?" to={["job"]} page="all jobs">
      <Loaded of={jobs}>
        {({ data }) => {
          const under = data.filter((job) => ["queued", "running", "paused"].includes(job.state));
          const shown = under.length ? under : data.slice(0, 3);
          return (
            <ul class="plain">
              {running.map((loop) => (
                <li key={loop.id}>
                  <ScreenLink to={["loop", loop.id]}>{oneLine(loop.id, 40)}</ScreenLink> iteration{" "}
                  {number((loop.last?.iteration ?? -1) + 1)}, for {seconds(now - loop.updated)}
                  {loop.last?.wall ? `; the last one took ${seconds(loop.last.wall)}` : ""}
                </li>
              ))}
              {!running.length && !under.length && <li class="quiet">Nothing. {data.length > 0 && "The newest jobs:"}</li>}
              {shown.slice(0, SHOWN).map((job) => (
                <li key={job.id}>
                  <ScreenLink to={["job", job.id]}>{oneLine(job.id, 40)}</ScreenLink> <JobState state={job.state} />{" "}
                  <span class="quiet">
                    step {number(job.step)} of {number(job.steps)}
                    {leftOf(job)}
                    {!under.length && <Ended job={job} />}
                    {job.reason && `; it waits: ${oneLine(job.reason, 80)}`}
                  </span>
                </li>
              ))}
              <NotShown count={under.length - SHOWN} what="jobs" />
            </ul>
          );
        }}
      </Loaded>
    </Card>
  );
}

/** When the last event of a job was. */
function Ended({ job: { id, step, state } }: { job: Jobs["data"][number] }) {
  const events = useResource(
    // each step has an event: those of the steps are not asked for
    (signal) => get("/v1/jobs/{job_id}/events", { path: { job_id: id }, query: { after: step }, signal }),
    [id, step, state],
  );
  const last = events.data?.data.at(-1) as { time?: number } | undefined;
  return last?.time ? <>, {ago(last.time)}</> : null;
}

/** A replica as /v1/pool tells of it. */
export interface Replica {
  state?: string;
  version?: string | null;
  in_flight?: number;
  last_restart?: { time: number; why: string } | null;
  [name: string]: unknown;
}

function Engines({ loops }: { loops: Resource<Loops> }) {
  const admin = may("admin");
  const queue = useResource((signal) => get("/v1/queue", { signal }), [], ["pool", "run", "batch"]);
  const pool = useResource(async (signal) => (admin ? get("/v1/pool", { signal }) : null), [admin], ["pool", "model"]);
  const without = pool.data && !pool.data.data.length && !pool.data.spares.length;
  const measured = loops.data?.data.find((loop) => typeof loop.last?.idle_share === "number");
  return (
    <Card title="Are the engines idle?">
      <Loaded of={pool}>
        {(data) => {
          if (!data) return null;
          const replicas = [...data.data, ...data.spares] as Replica[];
          if (without) return <Empty>No replica: no model is served.</Empty>;
          return (
            <ul class="plain">
              {replicas.slice(0, 24).map((replica, n) => (
                <li key={n}>
                  <ScreenLink to={["replica", String(n)]}>replica-{n}</ScreenLink> <ReplicaState of={replica} />{" "}
                  <Version id={replica.version} />{" "}
                  <span class="quiet">{replica.in_flight ? `${number(replica.in_flight)} requests` : "idle now"}</span>
                </li>
              ))}
              <NotShown count={replicas.length - 24} what="replicas" />
            </ul>
          );
        }}
      </Loaded>
      <Loaded of={queue}>
        {(data) => !without && (
          <p>
            {number(data.interactive.inside + data.batch.inside)} requests are at the engines, which take {number(data.capacity)}{" "}
            at once; {number(data.interactive.waiting + data.batch.waiting)} wait. A request takes {seconds(data.mean_seconds)}.
            {data.parked > 0 && ` ${number(data.parked)} wait for a version that no replica holds.`}{" "}
            {data.keys.slice(0, 5).map((one) => (
              <span class="chip" key={one.key}>
                {oneLine(one.name || "this host", 30)} {number(one.waiting)}
              </span>
            ))}
            <NotShown count={data.keys.length - 5} what="keys" />
          </p>
        )}
      </Loaded>
      {measured && (
        <p>
          In iteration {number(measured.last!.iteration)} of{" "}
          <ScreenLink to={["iteration", measured.id, String(measured.last!.iteration)]}>{oneLine(measured.id, 40)}</ScreenLink> they
          were idle for {percent(measured.last!.idle_share)} of the time.
        </p>
      )}
    </Card>
  );
}

function Agreement({ jobs }: { jobs: Resource<Jobs> }) {
  return (
    <Card title="Do trainer and sampler agree?">
      <Loaded of={jobs}>
        {({ data }) => {
          const job = data.find((one) => one.agreement);
          if (!job) return <Empty>No job has compared them yet. One does so before its first step, where replicas of this platform sampled its training set.</Empty>;
          return (
            <p>
              Before <ScreenLink to={["job", job.id]}>{oneLine(job.id, 40)}</ScreenLink> trained, <Agreed job={job} />
            </p>
          );
        }}
      </Loaded>
    </Card>
  );
}

function Cost({ loops }: { loops: Resource<Loops> }) {
  const since = Math.floor(Date.now() / 3_600_000) * 3600 - DAY;
  const spent = useResource((signal) => get("/v1/cost", { query: { by: "key", since }, signal }), [since]);
  const loop = loops.data?.data.find((one) => one.last)?.id;
  const [top] = [...(spent.data?.data ?? [])].sort((a, b) => b.prompt_tokens + b.sampled_tokens - a.prompt_tokens - a.sampled_tokens);
  return (
    <Card title="What did it cost?" to={["keys"]} page="keys and usage">
      {loop && (
        <p>
          <ScreenLink to={["loop", loop]}>{oneLine(loop, 40)}</ScreenLink> took <LoopCost loop={loop} />.
        </p>
      )}
      <Loaded of={spent}>
        {(table) => (
          <>
            <p class="quiet">The last 24 hours:</p>
            <Account table={table} />
            {top && (
              <p>
                Most was asked by{" "}
                <ScreenLink to={["keys"]} params={{ key: top.key || "none" }}>
                  {top.key ? oneLine(top.name ?? top.key, 60) : "this host, without a key"}
                </ScreenLink>
                : {number(top.prompt_tokens + top.sampled_tokens)} tokens.
              </p>
            )}
          </>
        )}
      </Loaded>
    </Card>
  );
}

function Wrong() {
  const admin = may("admin");
  const since = Math.floor(Date.now() / 1000) - DAY;
  const warnings = useResource((signal) => get("/v1/health/warnings", { signal }), [], ["run", "loop", "job"]);
  const runs = useResource(
    (signal) => get("/v1/trajectories/stats", { query: { since, percentiles: "false", limit: 1 } as never, signal }),
    [],
    ["run"],
  );
  const pool = useResource(async (signal) => (admin ? get("/v1/pool", { signal }) : null), [admin], ["pool"]);
  const replicas = [...(pool.data?.data ?? []), ...(pool.data?.spares ?? [])] as Replica[];
  const lost = replicas.flatMap((one, n) => (one.last_restart && one.last_restart.time > since ? [{ n, ...one.last_restart }] : []));
  const from = ` and started>=${new Date(since * 1000).toISOString()}`;
  return (
    <Card title="What went wrong today?" to={["runs"]} page="all runs">
      <Loaded of={warnings}>
        {({ data }) => (
          <ul class="plain" aria-live="polite">
            {data.map((one) => (
              <li key={one.kind + one.message}>
                <span class={`chip ${one.level === "error" ? "bad" : "fair"}`}>{one.kind.replace(/_/g, " ")}</span>{" "}
                {oneLine(one.message.replace(/`/g, '"'), 300)}{" "}
                {one.job && <ScreenLink to={["job", one.job]}>the job</ScreenLink>}
                {Object.keys(one.query ?? {}).length > 0 && (
                  <ScreenLink to={["runs"]} params={one.query as Record<string, string>}>
                    the runs
                  </ScreenLink>
                )}
              </li>
            ))}
            {lost.map((one) => (
              <li key={one.n}>
                <span class="chip bad">replica lost</span> <ScreenLink to={["replica", String(one.n)]}>replica-{one.n}</ScreenLink>{" "}
                {ago(one.time)}: {oneLine(one.why, 300)}
              </li>
            ))}
            {!data.length && !lost.length && <li class="quiet">No failed job, no lost replica, and nothing odd in the runs.</li>}
          </ul>
        )}
      </Loaded>
      <Loaded of={runs}>
        {({ data: [all] }) =>
          all ? (
            <p>
              Of {number(all.runs)} runs{" "}
              <ScreenLink to={["runs"]} params={{ q: `error${from}` }}>
                {number(all.errors)} ended with an error
              </ScreenLink>
              , and of the {number(all.rewarded)} with a reward{" "}
              <ScreenLink to={["runs"]} params={{ q: `reward<1${from}` }}>
                {number(Math.round(all.rewarded * (1 - (all.success ?? 1))))} failed
              </ScreenLink>
              .
            </p>
          ) : (
            <p class="quiet">No run began.</p>
          )
        }
      </Loaded>
    </Card>
  );
}

const SCREEN_OF: Record<string, string> = { run: "run", job: "job", loop: "loop", dataset: "dataset", batch: "batch" };

/** What changed since this page was opened; nothing before something does. */
function Changes() {
  const [list, setList] = useState<(Change & { at: number })[]>([]);
  useEffect(
    () =>
      onChange((change) => {
        if (change.kind === "*") return;
        const entry = { ...change, at: Date.now() / 1000 };
        setList((before) =>
          [entry, ...before.filter((one) => one.kind !== change.kind || one.id !== change.id)].slice(0, 10),
        );
      }),
    [],
  );
  if (!list.length) return null;
  return (
    <Card title="Changes since this page was opened">
      <ul class="plain">
        {list.map((one) => (
          <li key={one.kind + one.id}>
            {one.kind} <SubjectLink change={one} /> {oneLine(one.change, 30)}
          </li>
        ))}
      </ul>
    </Card>
  );
}

function SubjectLink({ change }: { change: Change }) {
  const screen = SCREEN_OF[change.kind];
  const text = oneLine(change.id, 40);
  return screen && change.id ? <ScreenLink to={[screen, change.id]}>{text}</ScreenLink> : <>{text}</>;
}
