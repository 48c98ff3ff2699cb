/** Jobs: of one, its state, why it waits or failed, settings, cost, curves, nodes, and the end of its log. */
import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import { costOf, devices } from "../components/account";
import { Action } from "../components/action";
import { Agreed, Differences } from "../components/agreed";
import { Chart } from "../components/chart";
import { JobState, Version } from "../components/chips";
import { CopyAs, quoted } from "../components/copy_as";
import { Facts } from "../components/facts";
import { JobHardware, JobNotes } from "../components/job_hardware";
import { Json } from "../components/json";
import { ScreenLink } from "../components/screen_link";
import { Empty, Loaded } from "../components/states";
import { Pages, sorted, Table } from "../components/table";
import { Text } from "../components/text";
import { address, get, post, request } from "../lib/api";
import type { components } from "../lib/openapi";
import { compact, leftOf, number, oneLine, percent, seconds, told } from "../lib/format";
import { wholeOf } from "../lib/pages";
import { useResource } from "../lib/resource";
import { setParams } from "../lib/route";
import type { ScreenProps } from ".";

const ACTS = ["pause", "resume", "cancel"] as const;
type Act = (typeof ACTS)[number];
/** What can be done in each state; nothing with a job that ended. */
const POSSIBLE: Record<string, readonly Act[]> = { queued: ["pause", "cancel"], running: ["pause", "cancel"], paused: ["resume", "cancel"] };
/** Measures that every job should have: one that it does not have is named, and is not 0. */
const CHIEF: Record<string, string> = { loss: "loss", grad_norm: "gradient norm", tokens_per_second: "tokens/s", mfu: "MFU", communication: "share of communication" };
const NAMES: Record<string, string> = { lr: "learning rate", memory_gib: "memory, GiB", tokens: "trained tokens", seconds: "time of a step" };
const SHOWN: Record<string, (value: number) => string> = { mfu: percent, communication: percent, seconds };
const PAGE = 50;

export default function Job({ path, params }: ScreenProps) {
  return path[0] ? <One key={path[0]} id={path[0]} params={params} /> : <List after={params.get("after")} />;
}

function List({ after }: { after: string | null }) {
  const jobs = useResource(
    (signal) => get("/v1/jobs", { query: { limit: PAGE, after: after ?? undefined }, signal }),
    [after],
    ["job"],
  );
  const costs = useCosts();
  return (
    <>
      <div class="row">
        <h1>Jobs</h1>
        <span class="spacer" />
        <CopyAs cli="cray-agents jobs list" path="/v1/jobs" python="await Platform().views.jobs()" />
      </div>
      <Loaded of={jobs}>
        {({ data, has_more }) => {
          if (!data.length) return <Empty>No training job yet.</Empty>;
          const [rows, sort] = sorted(
            data,
            {
              state: (one) => one.state,
              step: (one) => one.step,
              loss: (one) => one.loss_last,
              "trained tokens": (one) => one.trained_tokens,
              time: (one) => one.seconds || null,
              cost: (one) => costs(one.id)[1],
            },
            !after && !has_more,
          );
          return (
            <div class="section">
              <Table
                label="Jobs"
                heads={["job", "state", "step", "loss", "trained tokens", "time", "cost", "why"]}
                sort={sort}
                rows={rows.map((one) => [
                  <ScreenLink to={["job", one.id]}>{oneLine(one.id, 60)}</ScreenLink>,
                  <JobState state={one.state} />,
                  `${number(one.step)} of ${number(one.steps)}${leftOf(one)}`,
                  one.loss_last == null ? "–" : `${number(one.loss_first)} → ${number(one.loss_last)}`,
                  compact(one.trained_tokens),
                  seconds(one.seconds || null),
                  costs(one.id)[0],
                  oneLine(one.error || one.reason || "–", 160),
                ])}
              />
              <Pages after={after} next={has_more && data.at(-1)?.id} />
            </div>
          );
        }}
      </Loaded>
    </>
  );
}

/** Return a function that tells what a job cost, also as a number: money, else seconds. */
function useCosts(): (id: string) => [string, (number | null)?] {
  const { data, error } = useResource((signal) => wholeOf((after) => get("/v1/cost", { query: { by: "job", after }, signal })), [], ["job"]);
  return (id) => {
    const row = data?.data.find((one) => one.job === id);
    if (error) return [error.message];
    return data && row ? [costOf(row.spent, data), data.currency ? row.spent.cost : devices(row.spent, data)] : ["–"];
  };
}

function One({ id, params }: { id: string; params: URLSearchParams }) {
  const costs = useCosts();
  const [act, setAct] = useState<Act | null>(null);
  const sent = (signal: AbortSignal) => ({ path: { job_id: id }, signal });
  const job = useResource((signal) => get("/v1/jobs/{job_id}", sent(signal)), [id], ["job"]);
  const series = useResource((signal) => get("/v1/jobs/{job_id}/series", sent(signal)), [id], ["job"]);
  const hardware = useResource((signal) => get("/v1/jobs/{job_id}/hardware", sent(signal)), [id], ["job"]);
  const versions = useResource(async (signal) => (await get("/v1/models/lineage", { signal })).data, [], ["model"]).data ?? [];
  const log = useResource(
    async (signal) =>
      (await request("GET", address("/v1/jobs/{job_id}/logs", { job_id: id }, { tail: 40 }), undefined, signal, "text/plain")).text(),
    [id],
    ["job"],
  );
  return (
    <Loaded of={job}>
      {(data) => (
        <>
          <div class="row">
            <h1>{oneLine(data.id)}</h1>
            <JobState state={data.state} />
            <span class="spacer" />
            {ACTS.map((one) => (
              <button
                key={one}
                class={one === "cancel" ? "danger" : ""}
                disabled={!POSSIBLE[data.state]?.includes(one)}
                onClick={() => setAct(one)}
              >
                {one}
              </button>
            ))}
            <CopyAs
              cli={`cray-agents jobs show ${quoted(id)}`}
              python={`await Platform().job(${JSON.stringify(id)})`}
              path={`/v1/jobs/${encodeURIComponent(id)}/series`}
            />
          </div>
          {data.error && <p class="banner error">{oneLine(data.error, 1000)}</p>}
          <Loaded of={hardware}>{(nodes) => <JobNotes of={nodes} />}</Loaded>
          <div class="cards">
            <section class="card">
              <h2>State</h2>
              <Facts
                of={[
                  ["step", `${number(data.step)} of ${number(data.steps)}${leftOf(data)}`],
                  ["loss", `${number(data.loss_first)} → ${number(data.loss_last)}`],
                  ["trained tokens", compact(data.trained_tokens)],
                  ["time of its steps", seconds(data.seconds)],
                  ["cost", costs(id)[0]],
                  ["trainer and sampler", data.agreement && <Agreed job={data} />],
                  ["attempts", number(data.attempts)],
                  ["scheduler", oneLine(`${data.scheduler ?? ""} ${data.scheduler_job_id ?? ""}`)],
                  ["checkpoint", <span class="mono">{oneLine(data.checkpoint ?? (data.state in POSSIBLE ? "none yet" : "none"))}</span>],
                  ...versions.filter((one) => one.job === id).slice(0, 3).map((one): [string, ComponentChildren] => [
                    "made",
                    <>
                      <Version id={one.id} />
                      {one.parent && " of "}
                      {one.parent && <Version id={one.parent} />}
                      {one.dataset && ", on "}
                      {one.dataset && <ScreenLink to={["dataset", one.dataset]}>{oneLine(one.dataset, 60)}</ScreenLink>}
                    </>,
                  ]),
                ]}
              />
            </section>
            <Settings id={id} versions={versions} />
            <Differences job={data} />
            <Loaded of={series}>
              {({ series: curves }) => {
                const missing = Object.entries(CHIEF).filter(([name]) => !curves[name]?.length);
                const smooth = params.get("smooth") === "1";
                return (
                  <>
                    {Object.keys(curves).length > 0 && (
                      <div class="row" style={{ gridColumn: "1 / -1" }}>
                        <button aria-pressed={smooth} onClick={() => setParams({ smooth: smooth ? null : 1 })}>
                          Smooth the curves
                        </button>
                        {smooth && <span class="hint">Moving averages over about ten points; what was measured is faint.</span>}
                      </div>
                    )}
                    {[...Object.entries(CHIEF), ...others(curves)].map(
                      ([name, title]) =>
                        !!curves[name]?.length && (
                          <section class="card" key={name}>
                            <Chart title={oneLine(title, 60)} axis="step" smooth={smooth} show={SHOWN[name]} points={curves[name] as [number, number][]} />
                          </section>
                        ),
                    )}
                    {missing.length > 0 && <p class="hint">No data: {missing.map(([, title]) => title).join(", ")}.</p>}
                  </>
                );
              }}
            </Loaded>
            <Loaded of={hardware}>
              {(nodes) => <JobHardware of={nodes} node={params.get("node") ?? ""} choose={(node) => setParams({ node })} />}
            </Loaded>
            <section class="card wide">
              <h2>Log</h2>
              <Loaded of={log}>{(text) => <div class="mono">{text ? <Text text={text} lines={40} characters={8000} label="the log" /> : "Nothing is logged yet."}</div>}</Loaded>
            </section>
          </div>
          {act && (
            <Action
              title={`${act} the job`}
              danger={act === "cancel"}
              cli={() => `cray-agents jobs ${act} ${quoted(id)}`}
              act={(reason) => post(`/v1/jobs/{job_id}/${act}`, { path: { job_id: id }, reason } as never).then(job.reload)}
              close={() => setAct(null)}
            />
          )}
        </>
      )}
    </Loaded>
  );
}

/** Further measures, beside the chief ones. */
function others(curves: Record<string, unknown>): [string, string][] {
  const names = Object.keys(curves).filter((name) => !(name in CHIEF));
  return names.map((name) => [name, NAMES[name] ?? name.replace(/_/g, " ")]);
}

/** What the job was asked to do. */
function Settings({ id, versions }: { id: string; versions: readonly components["schemas"]["Ancestry"][] }) {
  const spec = useResource((signal) => get("/v1/jobs/{job_id}/spec", { path: { job_id: id }, signal }), [id]);
  return (
    <section class="card low" tabIndex={0} role="region" aria-label="Settings">
      <h2>Settings</h2>
      <Loaded of={spec}>
        {({ method, dataset, session, hyperparameters, ...rest }) => {
          const parent = versions.find((one) => one.checkpoint === rest.parent);
          return (
            <>
              <Facts
                of={[
                  ["method", oneLine(told(method), 40)],
                  ["loop, or session", typeof session === "string" && <ScreenLink to={["loop", session]}>{oneLine(session, 60)}</ScreenLink>],
                  ["dataset", typeof dataset === "string" && <ScreenLink to={["dataset", dataset]}>{oneLine(dataset, 60)}</ScreenLink>],
                  ["parent", parent ? <Version id={parent.id} /> : oneLine(told(rest.parent ?? ""), 60)],
                ]}
              />
              <Json name="hyperparameters" value={hyperparameters} open />
              <Json name="the rest" value={rest} />
            </>
          );
        }}
      </Loaded>
    </section>
  );
}
