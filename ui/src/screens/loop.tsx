/** Loop: the iterations of a loop as rows, and what became of the held-out success. */
import { Chart } from "../components/chart";
import { DecisionChip, Version } from "../components/chips";
import { CopyAs, quoted } from "../components/copy_as";
import { ScreenLink } from "../components/screen_link";
import { Empty, Failure, Loaded } from "../components/states";
import { get } from "../lib/api";
import { compact, number, oneLine, percent, seconds } from "../lib/format";
import type { components } from "../lib/openapi";
import { useResource } from "../lib/resource";
import type { ScreenProps } from ".";

type Iteration = components["schemas"]["Iteration"];
const MOST = 100; // rows: later iterations first

export default function Loop({ path }: ScreenProps) {
  const id = path[0] ?? "";
  const iterations = useResource(
    async (signal) =>
      (await get("/v1/loops/{loop}/iterations", { path: { loop: id }, signal })).data as unknown as Iteration[],
    [id],
    ["loop"],
  );
  if (!id) return <Failure error={new Error("The address names no loop.")} />;
  return (
    <>
      <div class="row">
        <h1>Loop {oneLine(id)}</h1>
        <ScreenLink to={["runs"]} params={{ q: `loop:${id}` }}>
          its runs
        </ScreenLink>
        <ScreenLink to={["tasks"]} params={{ q: `loop:${id}`, by: "iteration" }}>
          its tasks
        </ScreenLink>
        <span class="spacer" />
        <CopyAs
          cli={`cray-agents runs stats --where ${quoted(`loop=${id}`)}`}
          python={`await Platform().iterations(${JSON.stringify(id)})`}
          path={`/v1/loops/${encodeURIComponent(id)}/iterations`}
        />
      </div>
      <Loaded of={iterations}>
        {(list) =>
          list.length === 0 ? (
            <Empty>No iteration of this loop has ended.</Empty>
          ) : (
            <>
              <div class="cards">
                <section class="card">
                  <Chart
                    title="held-out success"
                    axis="iteration"
                    points={list.map((one) => [one.iteration, one.holdout_success])}
                  />
                </section>
                <section class="card">
                  <Chart title="good runs" axis="iteration" points={list.map((one) => [one.iteration, one.accepted_runs ?? 0])} />
                </section>
                <section class="card">
                  <Chart title="seconds" axis="iteration" points={list.map((one) => [one.iteration, one.wall ?? 0])} />
                </section>
              </div>
              <Rows list={[...list].reverse().slice(0, MOST)} loop={id} />
              {list.length > MOST && <p class="hint">The first {list.length - MOST} iterations are in the curves only.</p>}
            </>
          )
        }
      </Loaded>
    </>
  );
}

const COLUMNS = {
  iteration: "",
  version: "the candidate",
  decision: "",
  "held out": "success at the tasks that decide",
  test: "success at the tasks that neither train nor decide",
  pairs: "tasks at which the candidate did better, worse, or the same",
  evidence: "against: it is not better",
  runs: "for training",
  good: "runs of this iteration that a training set may take",
  tokens: "sampled in these runs",
  job: "",
  probe: "the largest difference of a log-probability between trainer and engine, in nats",
  time: "",
};

function Rows({ list, loop }: { list: Iteration[]; loop: string }) {
  return (
    <div class="table-box" tabIndex={0} role="region" aria-label="Iterations">
      <table>
        <thead>
          <tr>
            {Object.entries(COLUMNS).map(([name, about]) => (
              <th key={name} title={about || undefined}>
                {name}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {list.map((one) => (
            <tr key={one.iteration}>
              <td>
                <ScreenLink to={["iteration", loop, String(one.iteration)]}>{one.iteration}</ScreenLink>
              </td>
              <td>
                <Version id={one.version} />
              </td>
              <td>
                <DecisionChip record={one} compared={one.evidence !== null && one.evidence !== undefined} />
                {one.note && <div class="quiet">{oneLine(one.note, 200)}</div>}
                {one.remarks?.map((remark) => <div key={remark} class="quiet">{oneLine(remark, 200)}</div>)}
                {one.stopped && <div class="quiet">{oneLine(one.stopped, 200)}</div>}
              </td>
              <td>
                {percent(one.holdout_success)} <span class="quiet">of {number(one.holdout_tasks)}</span>
              </td>
              <td>
                {one.test_tasks ? (
                  <>
                    {percent(one.test_success)} <span class="quiet">
                      of {number(one.test_tasks)}
                      {one.test_version !== one.version && `, by ${oneLine(one.test_version ?? "?", 40)}`}
                    </span>
                  </>
                ) : (
                  "–"
                )}
              </td>
              <td>
                {one.wins === null || one.wins === undefined
                  ? "–"
                  : `${number(one.wins)} won, ${number(one.losses)} lost, ${number(one.ties)} even`}
              </td>
              <td>{number(one.evidence)}</td>
              <td>
                <ScreenLink to={["runs"]} params={{ q: `loop:${loop} and iteration:${one.iteration}` }}>
                  {number(one.runs)}
                </ScreenLink>
              </td>
              <td>{number(one.accepted_runs)}</td>
              <td>{compact(one.tokens)}</td>
              <td>{one.job ? <ScreenLink to={["job", one.job]}>{oneLine(one.job.replace(/^job-/, ""), 8)}</ScreenLink> : "–"}</td>
              <td>{number(one.probe_max_logprob_diff)}</td>
              <td title={oneLine(phases(one), 300)}>{seconds(one.wall)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function phases(one: Iteration): string {
  return Object.entries(one.seconds ?? {})
    .map(([name, value]) => `${name} ${seconds(value)}`)
    .join(", ");
}
