/** Loop: the generations of a loop as rows, and what became of the held-out success. */
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

type Generation = components["schemas"]["Generation"];
const MOST = 100; // rows: later generations first

export default function Loop({ path }: ScreenProps) {
  const id = path[0] ?? "";
  const generations = useResource(
    async (signal) =>
      (await get("/v1/loops/{loop}/generations", { path: { loop: id }, signal })).data as unknown as Generation[],
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
        <ScreenLink to={["tasks"]} params={{ q: `loop:${id}`, by: "generation" }}>
          its tasks
        </ScreenLink>
        <span class="spacer" />
        <CopyAs
          cli={`cray-agents runs stats --where ${quoted(`loop=${id}`)}`}
          python={`await Platform().generations(${JSON.stringify(id)})`}
          path={`/v1/loops/${encodeURIComponent(id)}/generations`}
        />
      </div>
      <Loaded of={generations}>
        {(list) =>
          list.length === 0 ? (
            <Empty>No generation of this loop has ended.</Empty>
          ) : (
            <>
              <div class="cards">
                <section class="card">
                  <Chart
                    title="held-out success"
                    axis="generation"
                    points={list.map((one) => [one.generation, one.holdout_success])}
                  />
                </section>
                <section class="card">
                  <Chart title="good runs" axis="generation" points={list.map((one) => [one.generation, one.accepted_runs ?? 0])} />
                </section>
                <section class="card">
                  <Chart title="seconds" axis="generation" points={list.map((one) => [one.generation, one.wall ?? 0])} />
                </section>
              </div>
              <Rows list={[...list].reverse().slice(0, MOST)} loop={id} />
              {list.length > MOST && <p class="hint">The first {list.length - MOST} generations are in the curves only.</p>}
            </>
          )
        }
      </Loaded>
    </>
  );
}

const COLUMNS = {
  generation: "",
  version: "the candidate",
  decision: "",
  "held out": "success at the tasks that decide",
  test: "success at the tasks that neither train nor decide",
  pairs: "tasks at which the candidate did better, worse, or the same",
  evidence: "against: it is not better",
  runs: "for training",
  good: "runs of this generation that a training set may take",
  tokens: "sampled in these runs",
  job: "",
  probe: "the largest difference of a log-probability between trainer and engine, in nats",
  time: "",
};

function Rows({ list, loop }: { list: Generation[]; loop: string }) {
  return (
    <div class="table-box" tabIndex={0} role="region" aria-label="Generations">
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
            <tr key={one.generation}>
              <td>
                <ScreenLink to={["generation", loop, String(one.generation)]}>{one.generation}</ScreenLink>
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
                <ScreenLink to={["runs"]} params={{ q: `loop:${loop} and generation:${one.generation}` }}>
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

function phases(one: Generation): string {
  return Object.entries(one.seconds ?? {})
    .map(([name, value]) => `${name} ${seconds(value)}`)
    .join(", ");
}
