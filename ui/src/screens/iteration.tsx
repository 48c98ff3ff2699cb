/** Iteration: why its candidate was promoted or rejected, what it was trained on, and where the time went. */
import { useState } from "preact/hooks";
import { Chart } from "../components/chart";
import { DecisionChip, Version } from "../components/chips";
import { CopyAs } from "../components/copy_as";
import { Download } from "../components/download";
import { Facts } from "../components/facts";
import { Funnel } from "../components/funnel";
import { ScreenLink } from "../components/screen_link";
import { Empty, Failure, Loaded } from "../components/states";
import { Table } from "../components/table";
import { Timeline, type TraceEvent } from "../components/timeline";
import { address, get } from "../lib/api";
import { number, oneLine, percent, signed, time } from "../lib/format";
import { useKeys } from "../lib/keyboard";
import type { components } from "../lib/openapi";
import { useResource } from "../lib/resource";
import { go, href, setParams } from "../lib/route";
import type { ScreenProps } from ".";

type Detail = components["schemas"]["IterationDetail"];
type Pair = components["schemas"]["ShownPair"];
type Outcome = Pair["outcome"];
const PAGE = 50; // pairs
const MOST_GROUPS = 10_000; // the most that an answer has
const SHOWN_GROUPS = 30;
const OUTCOMES: readonly Outcome[] = ["won", "lost", "even"];
const TONES: Record<Outcome, string> = { won: "good", lost: "bad", even: "" };

export default function IterationScreen({ path, params }: ScreenProps) {
  const [loop, text] = [path[0] ?? "", path[1] ?? ""];
  const count = Number(text);
  const named = loop !== "" && /^\d{1,9}$/.test(text);
  const ids = { loop, number: count };
  const detail = useResource(
    (signal) => get("/v1/loops/{loop}/iterations/{number}", { path: ids as never, signal }),
    [loop, text],
  );
  const neighbour = (step: number) => named && count + step >= 0 && go(href(["iteration", loop, String(count + step)]));
  useKeys({
    "[": ["the iteration before", () => neighbour(-1)],
    "]": ["the iteration after", () => neighbour(1)],
  });
  if (!named) return <Failure error={new Error("The address names no iteration: it is #/iteration/LOOP/NUMBER.")} />;
  const trace = address("/v1/loops/{loop}/iterations/{number}/timeline", ids);
  return (
    <>
      <div class="row">
        <h1>
          Iteration {count} of <ScreenLink to={["loop", loop]}>{oneLine(loop, 80)}</ScreenLink>
        </h1>
        {detail.data && <DecisionChip record={detail.data.record} compared={compared(detail.data)} />}
        <span class="spacer" />
        <button disabled={count === 0} onClick={() => neighbour(-1)} aria-label="The iteration before">
          ←
        </button>
        <button onClick={() => neighbour(1)} aria-label="The iteration after">
          →
        </button>
        <Download path={trace} name={`${loop}-${count}.trace.json`}>
          Download for Perfetto
        </Download>
        <CopyAs
          python={`await Platform().views.iteration(${JSON.stringify(loop)}, ${count})`}
          path={address("/v1/loops/{loop}/iterations/{number}", ids)}
        />
      </div>
      <Loaded of={detail}>
        {(data) => (
          <div class="section">
            <div class="cards">
              <DecisionCard detail={data} />
              <EvidenceCard detail={data} />
              <GuardsCard detail={data} />
              <TrainingSet record={data.record} />
              <Groups loop={loop} iteration={count} />
            </div>
            <TimelineCard key={trace} loop={loop} iteration={count} idle={data.record.idle_share ?? null} />
            {data.pairs !== null && (
              <Pairs key={`${loop}/${count}`} loop={loop} iteration={count} params={params} />
            )}
          </div>
        )}
      </Loaded>
    </>
  );
}

/** Tell whether a candidate was compared with what was promoted. */
function compared({ decision, record }: Detail): boolean {
  return decision !== null || (record.evidence !== null && record.evidence !== undefined);
}

function whyNot(detail: Detail): string {
  if (compared(detail)) return "no reason is on record";
  return detail.record.iteration === 0 ? "the loop began with it: there was nothing to compare" : "nothing was compared";
}

function DecisionCard({ detail }: { detail: Detail }) {
  const { decision, record, incumbent } = detail;
  const numbers = decision?.numbers;
  const gaps = [record.unscored, record.unpaired, record.failed_pairs].map((one) => one ?? 0);
  return (
    <section class="card">
      <h2>Decision</h2>
      <Facts
        of={[
          [compared(detail) ? "candidate" : "version", <Version id={record.version} />],
          ["against", incumbent && <Version id={incumbent} />],
          ["held-out", record.holdout_tasks ? `${percent(record.holdout_success)} of ${number(record.holdout_tasks)} tasks` : "not evaluated"],
          [
            "test",
            !!record.test_tasks &&
              `${percent(record.test_success)} of ${number(record.test_tasks)} tasks, by ${oneLine(record.test_version ?? "", 60)}`,
          ],
          ["difference", numbers && `${signed(numbers.difference)} ± ${number(numbers.error)}`],
          [
            "pairs",
            compared(detail) &&
              `${number(record.wins)} won, ${number(record.losses)} lost, ${number(record.ties)} even${numbers ? `, of at most ${number(numbers.planned)}` : ""}`,
          ],
          ["evidence", compared(detail) && `${number(record.evidence)}${numbers ? `, ${number(numbers.limit)} needed` : ""}`],
          [
            "incomplete",
            compared(detail) &&
              (gaps.some(Boolean)
                ? `${number(gaps[0])} unscored (count as the worst), ${number(gaps[1])} without the incumbent's reward, ${number(gaps[2])} failed by the infrastructure`
                : "none"),
          ],
          [
            "logprob check",
            record.probe_max_logprob_diff == null
              ? "not measured"
              : `${number(record.probe_max_logprob_diff)} nats at most between trainer and engine`,
          ],
          ["by", decision && oneLine(decision.who, 100)],
          ["at", decision && time(decision.time)],
          ["why", oneLine(decision?.reason || record.note || whyNot(detail), 600)],
          ["the loop ended", record.stopped && oneLine(record.stopped, 300)],
          ["job", record.job && <ScreenLink to={["job", record.job]}>{oneLine(record.job, 60)}</ScreenLink>],
        ]}
      />
    </section>
  );
}

function EvidenceCard({ detail }: { detail: Detail }) {
  const { curve } = detail;
  return (
    <section class="card">
      <h2>Evidence that it is better</h2>
      {curve ? (
        <>
          <Chart
            title="evidence"
            axis="pairs"
            points={curve.points as [number, number][]}
            limit={curve.limit}
            logarithmic
          />
          <p class="quiet">
            A bet on each pair; promoted at the dashed line, {number(curve.limit)} = 1 / {number(curve.alpha)}. A candidate
            that is no better gets there with a chance of at most {percent(curve.alpha)}.
          </p>
        </>
      ) : (
        <Empty>
          {compared(detail)
            ? "The pairs of this decision are not on record: an older version of the loop made it."
            : "No candidate was compared in this iteration."}
        </Empty>
      )}
    </section>
  );
}

function GuardsCard({ detail }: { detail: Detail }) {
  const guards = detail.decision?.numbers?.guards ?? [];
  return (
    <section class="card">
      <h2>Guards</h2>
      {guards.length === 0 ? (
        <Empty>No guard was on: the test watches no tag, and saw no hidden probes.</Empty>
      ) : (
        <Table
          label="Guards"
          heads={["tag", "tasks#", "difference#", "evidence#"]}
          rows={guards.map((one) => [
            <>
              {oneLine(one.tag, 80)} <span class={`chip ${one.failed ? "bad" : "good"}`}>{one.failed ? "failed" : "holds"}</span>
            </>,
            number(one.tasks),
            `${signed(one.difference)} ± ${number(one.error)}`,
            `${number(one.evidence)}, fails at ${number(one.limit)}`,
          ])}
        />
      )}
    </section>
  );
}

function TrainingSet({ record }: { record: Detail["record"] }) {
  const id = record.dataset ?? null;
  const histograms = useResource(
    async (signal) => (id ? get("/v1/datasets/{dataset_id}/histograms", { path: { dataset_id: id }, signal }) : null),
    [id],
  );
  return (
    <section class="card">
      <h2>Training set</h2>
      {id ? (
        <>
          <p>
            <ScreenLink to={["dataset", id]}>{oneLine(id, 60)}</ScreenLink>
          </p>
          <Loaded of={histograms}>
            {(data) =>
              data && (
                <>
                  <Funnel dataset={id} counts={data.funnel} />
                  {data.funnel.considered !== record.runs && (
                    <p class="hint">
                      The set considers runs of several iterations. Of the {number(record.runs)} of this one{" "}
                      {number(record.accepted_runs)} were good.
                    </p>
                  )}
                </>
              )
            }
          </Loaded>
        </>
      ) : (
        <Empty>{record.job ? "The set of its job is not on record." : "Nothing was trained in this iteration."}</Empty>
      )}
    </section>
  );
}

/** The tasks of an iteration's training runs; those whose attempts got all the same reward teach nothing. */
function Groups({ loop, iteration }: { loop: string; iteration: number }) {
  const stats = useResource(
    (signal) =>
      get("/v1/trajectories/stats", {
        query: { loop, iteration, split: "train", by: "task", limit: MOST_GROUPS } as never,
        signal,
      }),
    [loop, iteration],
  );
  return (
    <section class="card">
      <h2>Groups of attempts</h2>
      <Loaded of={stats}>
        {({ data, has_more }) => {
          const tried = data.filter((one) => one.rewarded > 1);
          const flat = tried.filter((one) => one.min_reward === one.max_reward);
          if (!data.length) return <Empty>No training run of this iteration is stored.</Empty>;
          const seen = has_more ? `the ${number(data.length)} tasks with the most runs` : `${number(data.length)} tasks`;
          if (!tried.length) return <Empty>Of {seen} none has a second rewarded attempt: there are no groups.</Empty>;
          const order = [...flat, ...tried.filter((one) => !flat.includes(one))].slice(0, SHOWN_GROUPS);
          return (
            <>
              <p>
                <span class={`chip ${flat.length ? "bad" : "good"}`}>{number(flat.length)} without variance</span> of{" "}
                {number(tried.length)}
                {has_more && ` among ${seen}`}
              </p>
              <Table
                label="Groups"
                heads={["task", "attempts#", "rewards#", "variance"]}
                rows={order.map((one) => [
                  <ScreenLink to={["runs"]} params={{ loop, iteration, task: one.task ?? "" }}>
                    {oneLine(one.input ?? one.task ?? "no task", 60)}
                  </ScreenLink>,
                  number(one.runs),
                  one.min_reward === one.max_reward ? number(one.min_reward) : `${number(one.min_reward)} – ${number(one.max_reward)}`,
                  flat.includes(one) && <span class="chip bad">all the same</span>,
                ])}
              />
              {tried.length > order.length && <p class="hint">{number(tried.length - order.length)} more are not listed.</p>}
            </>
          );
        }}
      </Loaded>
    </section>
  );
}

function Pairs({ loop, iteration, params }: { loop: string; iteration: number; params: URLSearchParams }) {
  const outcome = OUTCOMES.find((one) => one === params.get("outcome")) ?? null;
  const at = Math.max(0, Math.floor(Number(params.get("from")) || 0));
  const pairs = useResource(
    (signal) =>
      get("/v1/loops/{loop}/iterations/{number}/pairs", {
        path: { loop, number: iteration } as never,
        query: { outcome: outcome ?? undefined, at, limit: PAGE } as never,
        signal,
      }),
    [loop, iteration, outcome, at],
  );
  const rows = pairs.data?.data ?? [];
  const chosen = rows.findIndex((one) => String(one.n) === params.get("pair"));
  const select = (n: number) => {
    const row = rows[Math.min(rows.length - 1, Math.max(0, n))];
    if (row) setParams({ pair: row.n });
  };
  const open = (pair: Pair | undefined) =>
    pair && go(href(["compare"], { a: pair.incumbent_run, b: pair.candidate_run }));
  useKeys({
    j: ["next pair", () => select(chosen + 1)],
    k: ["previous pair", () => select(chosen - 1)],
    Enter: ["compare the runs of the pair", () => open(rows[chosen])],
  });
  return (
    <section class="card wide">
      <div class="row">
        <h2>Pairs</h2>
        <span class="spacer" />
        {[null, ...OUTCOMES].map((one) => (
          <button
            key={one ?? "all"}
            aria-pressed={one === outcome}
            onClick={() => setParams({ outcome: one, from: null, pair: null })}
          >
            {one ?? "all"}
          </button>
        ))}
      </div>
      <Loaded of={pairs}>
        {({ data, total, next }) =>
          total === 0 ? (
            <Empty>{outcome ? `No pair was ${outcome}.` : "No pair was complete."}</Empty>
          ) : (
            <>
              <PairTable rows={data} chosen={chosen} />
              <div class="row" style={{ marginTop: "0.5rem" }}>
                <span class="quiet">
                  {number(at + 1)} – {number(at + data.length)} of {number(total)}
                </span>
                <button disabled={at === 0} onClick={() => setParams({ from: Math.max(0, at - PAGE), pair: null })}>
                  Previous
                </button>
                <button disabled={next === null} onClick={() => setParams({ from: next, pair: null })}>
                  Next
                </button>
              </div>
            </>
          )
        }
      </Loaded>
    </section>
  );
}

function PairTable({ rows, chosen }: { rows: Pair[]; chosen: number }) {
  return (
    <Table
      label="Pairs of runs"
      heads={["n#", "task", "tag", "incumbent#", "candidate#", "outcome", "evidence#", "both"]}
      selected={chosen}
      rows={rows.map((one) => [
        number(one.n),
        oneLine(one.task, 60),
        one.tag === null ? "–" : oneLine(one.tag, 40),
        <ScreenLink to={["run", one.incumbent_run]}>{number(one.incumbent)}</ScreenLink>,
        <ScreenLink to={["run", one.candidate_run]}>{number(one.candidate)}</ScreenLink>,
        <span class={`chip ${TONES[one.outcome]}`}>{one.outcome}</span>,
        number(one.wealth),
        <ScreenLink to={["compare"]} params={{ a: one.incumbent_run, b: one.candidate_run }}>
          compare
        </ScreenLink>,
      ])}
    />
  );
}

function TimelineCard({ loop, iteration, idle }: { loop: string; iteration: number; idle: number | null }) {
  const [open, setOpen] = useState(true);
  const trace = useResource(
    async (signal) =>
      (await get("/v1/loops/{loop}/iterations/{number}/timeline", {
        path: { loop, number: iteration } as never,
        signal,
      })) as unknown as { traceEvents: TraceEvent[]; otherData: { runs_left_out?: number } },
    [loop, iteration],
  );
  return (
    <section class="card wide">
      <div class="row" style={{ marginBottom: "0.5rem" }}>
        <h2 style={{ margin: 0 }}>Timeline</h2>
        <span class="quiet">
          {idle === null ? "how long engines were idle is not known" : `engines were idle for ${percent(idle)} of it`}
        </span>
        <span class="spacer" />
        <button aria-expanded={open} onClick={() => setOpen(!open)}>
          {open ? "Fold" : "Show"}
        </button>
      </div>
      {open && (
        <Loaded of={trace}>
          {({ traceEvents, otherData }) => (
            <>
              <Timeline events={traceEvents} />
              {!!otherData.runs_left_out && (
                <p class="hint">{number(otherData.runs_left_out)} runs are not drawn: the first ones are.</p>
              )}
            </>
          )}
        </Loaded>
      )}
    </section>
  );
}
