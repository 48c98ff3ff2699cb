/** Job: the state of a training job, why it waits or failed, its measures as curves, its nodes, and the end of its log. */
import { useState } from "preact/hooks";
import { Action } from "../components/action";
import { Chart } from "../components/chart";
import { JobState, Version } from "../components/chips";
import { CopyAs, quoted } from "../components/copy_as";
import { JobHardware, JobNotes } from "../components/job_hardware";
import { ScreenLink } from "../components/screen_link";
import { Failure, Loaded } from "../components/states";
import { Text } from "../components/text";
import { address, get, post, request } from "../lib/api";
import { compact, number, oneLine, seconds } from "../lib/format";
import { useResource } from "../lib/resource";
import { setParams } from "../lib/route";
import type { ScreenProps } from ".";

const ACTS = ["pause", "resume", "cancel"] as const;
type Act = (typeof ACTS)[number];
/** What can be done in each state; nothing with a job that ended. */
const POSSIBLE: Record<string, readonly Act[]> = { queued: ["pause", "cancel"], running: ["pause", "cancel"], paused: ["resume", "cancel"] };
/** Measures that every job has a place for: one that it does not have says "no data", which is not 0. */
const CHIEF = { loss: "loss", grad_norm: "gradient norm", tokens_per_second: "tokens/s", mfu: "MFU", communication: "share of communication" };
const NAMES: Record<string, string> = { lr: "learning rate", memory_gib: "memory, GiB", tokens: "trained tokens", seconds: "seconds of a step" };
const NO_POINTS: [number, number][] = [];

export default function Job({ path, params }: ScreenProps) {
  const id = path[0] ?? "";
  const [act, setAct] = useState<Act | null>(null);
  const sent = (signal: AbortSignal) => ({ path: { job_id: id }, signal });
  const job = useResource((signal) => get("/v1/jobs/{job_id}", sent(signal)), [id], ["job"]);
  const series = useResource((signal) => get("/v1/jobs/{job_id}/series", sent(signal)), [id], ["job"]);
  const hardware = useResource((signal) => get("/v1/jobs/{job_id}/hardware", sent(signal)), [id], ["job"]);
  const made = useResource(
    async (signal) => (await get("/v1/models/lineage", { signal })).data.filter((one) => one.job === id),
    [id],
    ["model"],
  );
  const log = useResource(
    async (signal) =>
      (await request("GET", address("/v1/jobs/{job_id}/logs", { job_id: id }, { tail: 40 }), undefined, signal, "text/plain")).text(),
    [id],
    ["job"],
  );
  if (!id) return <Failure error={new Error("The address names no job.")} />;
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
              <dl class="facts">
                <dt>step</dt>
                <dd>
                  {number(data.step)} of {number(data.steps)}
                </dd>
                <dt>loss</dt>
                <dd>
                  {number(data.loss_first)} → {number(data.loss_last)}
                </dd>
                <dt>trained tokens</dt>
                <dd>{compact(data.trained_tokens)}</dd>
                <dt>seconds</dt>
                <dd>{seconds(data.seconds)}</dd>
                <dt>attempts</dt>
                <dd>{number(data.attempts)}</dd>
                <dt>scheduler</dt>
                <dd>
                  {oneLine(data.scheduler ?? "")} {oneLine(data.scheduler_job_id ?? "")}
                </dd>
                <dt>checkpoint</dt>
                <dd class="mono">{oneLine(data.checkpoint ?? (data.state in POSSIBLE ? "none yet" : "none"))}</dd>
                {made.data?.slice(0, 3).map((one) => (
                  <div key={one.id} style={{ display: "contents" }}>
                    <dt>made</dt>
                    <dd>
                      <Version id={one.id} />
                      {one.parent && (
                        <>
                          {" "}
                          of <Version id={one.parent} />
                        </>
                      )}
                      {one.dataset && (
                        <>
                          , on <ScreenLink to={["dataset", one.dataset]}>{oneLine(one.dataset, 60)}</ScreenLink>
                        </>
                      )}
                    </dd>
                  </div>
                ))}
              </dl>
            </section>
            <Loaded of={series}>
              {({ series: curves }) => (
                <>
                  {[...Object.entries(CHIEF), ...others(curves)].map(([name, title]) => (
                    <section class="card" key={name}>
                      <Chart title={oneLine(title, 60)} axis="step" points={(curves[name] ?? NO_POINTS) as [number, number][]} />
                    </section>
                  ))}
                </>
              )}
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
