/** Loops: their curves over each other; of one, its iterations as rows, its cost and its settings. */
import { LoopCost } from "../components/account";
import { Chart } from "../components/chart";
import { DecisionChip, Version } from "../components/chips";
import { CopyAs, quoted } from "../components/copy_as";
import { Json } from "../components/json";
import { ScreenLink } from "../components/screen_link";
import { Empty, Loaded } from "../components/states";
import { asCurve, testCurve } from "../components/success_chart";
import { Head, Pages, sorted, Table } from "../components/table";
import { get } from "../lib/api";
import { ago, compact, loopMethod, number, oneLine, percent, seconds } from "../lib/format";
import type { components } from "../lib/openapi";
import { useResource } from "../lib/resource";
import type { ScreenProps } from ".";

type Iteration = components["schemas"]["Iteration"];
const MOST = 100; // rows: later iterations first

const PAGE = 50;
const MOST_CURVES = 5;

export default function Loop({ path, params }: ScreenProps) {
  return path[0] ? <One key={path[0]} id={path[0]} /> : <List after={params.get("after")} />;
}

function List({ after }: { after: string | null }) {
  const loops = useResource(
    (signal) => get("/v1/loops", { query: { limit: PAGE, after: after ?? undefined }, signal }),
    [after],
    ["loop"],
  );
  return (
    <>
      <div class="row">
        <h1>Loops</h1>
        <span class="spacer" />
        <CopyAs cli="cray-agents status --watch" path="/v1/loops" python="[loop async for loop in Platform().views.loops()]" />
      </div>
      <Loaded of={loops}>
        {({ data, has_more }) => {
          const drawn = data.filter((one) => one.holdout.length).slice(0, MOST_CURVES).map((one) => asCurve(one));
          if (!data.length) return <Empty>No loop ran yet. "cray-agents demo" shows one.</Empty>;
          const [rows, sort] = sorted(
            data,
            {
              loop: (one) => one.id,
              method: (one) => one.last?.method,
              iterations: (one) => one.iterations,
              "held-out": (one) => one.last?.holdout_success,
              "at first": (one) => one.holdout[0]?.success,
              test: (one) => testCurve(one.holdout).points.at(-1)?.[1],
              target: (one) => one.last?.target,
              changed: (one) => one.updated,
            },
            !after && !has_more,
          );
          return (
            <div class="section">
              <section class="card wide">
                <h2>Held-out success</h2>
                <Chart title="no loop" points={[]} {...drawn[0]} more={drawn.slice(1)} axis="iteration" share show={percent} />
              </section>
              <Table
                label="Loops"
                heads={["loop", "method", "iterations", "held-out", "at first", "test", "target", "version", "control", "changed"]}
                sort={sort}
                rows={rows.map(({ id, iterations, last, holdout, updated }) => [
                  <ScreenLink to={["loop", id]}>{oneLine(id, 60)}</ScreenLink>,
                  loopMethod(last?.iteration ? last.method : null),
                  number(iterations),
                  percent(last?.holdout_success),
                  percent(holdout[0]?.success),
                  percent(testCurve(holdout).points.at(-1)?.[1]),
                  percent(last?.target),
                  <Version id={last?.version} />,
                  oneLine(last?.control ?? "–", 40),
                  ago(updated),
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

/** What a loop took in all, and its settings as they were recorded. */
function About({ id }: { id: string }) {
  const settings = useResource((signal) => get("/v1/loops/{loop}/settings", { path: { loop: id }, signal }), [id]);
  return (
    <section class="card wide">
      <h2>Cost and settings</h2>
      <p>
        It took <LoopCost loop={id} />.
      </p>
      <Loaded of={settings}>
        {({ data }) =>
          data.length ? (
            <>
              {data.length > 1 && <p class="hint">They were changed {data.length - 1} times: these are the last.</p>}
              <Json name="settings" value={data.at(-1)} open />
            </>
          ) : (
            <p class="quiet">Its settings are not on record: another client wrote its iterations.</p>
          )
        }
      </Loaded>
    </section>
  );
}

function One({ id }: { id: string }) {
  const iterations = useResource(
    async (signal) =>
      (await get("/v1/loops/{loop}/iterations", { path: { loop: id }, signal })).data as unknown as Iteration[],
    [id],
    ["loop"],
  );
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
                    share
                    show={percent}
                    limit={list.at(-1)?.target}
                    limitName="target"
                    points={list.map((one) => [one.iteration, one.holdout_success])}
                    more={[testCurve(list.map((one) => ({ iteration: one.iteration, test: one.test_success })))]}
                  />
                </section>
                <section class="card">
                  <Chart
                    title="loss, at the end"
                    axis="iteration"
                    points={list.flatMap((one): [number, number][] => (one.loss_last == null ? [] : [[one.iteration, one.loss_last]]))}
                  />
                </section>
                <section class="card">
                  <Chart title="good runs" axis="iteration" points={list.map((one) => [one.iteration, one.accepted_runs ?? 0])} />
                </section>
                <section class="card">
                  <Chart title="time" axis="iteration" show={seconds} points={list.map((one) => [one.iteration, one.wall ?? 0])} />
                </section>
              </div>
              <Rows list={[...list].reverse().slice(0, MOST)} whole={list.length <= MOST} loop={id} />
              {list.length > MOST && <p class="hint">The first {list.length - MOST} iterations are in the curves only.</p>}
              <div class="section">
                <About id={id} />
              </div>
            </>
          )
        }
      </Loaded>
    </>
  );
}

const COLUMNS = {
  iteration: "",
  method: "",
  version: "the candidate",
  outcome: "",
  "held-out": "success at the tasks that decide",
  test: "success at the tasks that neither train nor decide",
  pairs: "tasks at which the candidate did better, worse, or the same",
  evidence: "against: it is not better",
  runs: "for training",
  good: "runs with the reward of a good one: a training set may take them",
  tokens: "sampled in these runs",
  job: "",
  "logprob check": "the largest difference of a log-probability between trainer and engine, in nats",
  time: "",
};

function Rows({ list, whole, loop }: { list: Iteration[]; whole: boolean; loop: string }) {
  const [rows, sort] = sorted(
    list,
    {
      iteration: (one) => one.iteration,
      outcome: (one) => Number(one.promoted),
      "held-out": (one) => one.holdout_success,
      test: (one) => (one.test_tasks ? one.test_success : null),
      evidence: (one) => one.evidence,
      runs: (one) => one.runs,
      good: (one) => one.accepted_runs,
      tokens: (one) => one.tokens,
      "logprob check": (one) => one.probe_max_logprob_diff,
      time: (one) => one.wall,
    },
    whole,
  );
  return (
    <div class="table-box" tabIndex={0} role="region" aria-label="Iterations">
      <table>
        <thead>
          <tr>
            {Object.entries(COLUMNS).map(([name, about]) => (
              <Head key={name} name={name} sort={sort} title={about || undefined} />
            ))}
          </tr>
        </thead>
        <tbody>
          {rows.map((one) => (
            <tr key={one.iteration}>
              <td>
                <ScreenLink to={["iteration", loop, String(one.iteration)]}>{one.iteration}</ScreenLink>
              </td>
              <td>{loopMethod(one.iteration ? one.method : null)}</td>
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
