/** Dataset diff: two training sets side by side: their runs, the reasons, the recipes, the distributions. */
import { useState } from "preact/hooks";
import { address, get } from "../lib/api";
import { compact, NONE, number, oneLine, percent, signed } from "../lib/format";
import { useKeys } from "../lib/keyboard";
import type { components } from "../lib/openapi";
import { useResource } from "../lib/resource";
import { go, href, setParams } from "../lib/route";
import { openRun } from "../lib/run_list";
import { CopyAs } from "./copy_as";
import { RunLink, ScreenLink } from "./screen_link";
import { Empty, Loaded, NotShown } from "./states";
import { Table } from "./table";

type Differences = components["schemas"]["DatasetDifferences"];
type Compared = components["schemas"]["ComparedHistogram"];
type Change = components["schemas"]["ChangedRun"]["change"];

const PAGE = 50;
const CHANGES: Record<Change, string> = {
  added: "added",
  removed: "removed",
  changed: "in both, changed",
  kept: "in both, the same",
  out: "in neither",
};
const NAMES = Object.keys(CHANGES) as Change[];
const FIGURES: [name: "samples" | "tokens" | "trained_tokens" | "accepted_runs" | "considered_runs", about: string][] = [
  ["samples", "samples"],
  ["tokens", "tokens"],
  ["trained_tokens", "trained tokens"],
  ["accepted_runs", "accepted runs"],
  ["considered_runs", "runs considered"],
];

/** `one` is what was before, `other` what comes after. */
export function DatasetDiff({ one, other, params }: { one: string; other: string; params: URLSearchParams }) {
  const query = { a: one, b: other };
  const diff = useResource((signal) => get("/v1/datasets/diff", { query: query as never, signal }), [one, other]);
  return (
    <>
      <div class="row">
        <h1>
          Datasets <ScreenLink to={["dataset", one]}>{oneLine(one, 60)}</ScreenLink> and{" "}
          <ScreenLink to={["dataset", other]}>{oneLine(other, 60)}</ScreenLink>
        </h1>
        <span class="spacer" />
        <button onClick={() => go(href(["dataset", other], { against: one }))}>Swap</button>
        <CopyAs
          python={`await Platform().views.dataset_diff(${JSON.stringify(one)}, ${JSON.stringify(other)})`}
          path={address("/v1/datasets/diff", {}, query)}
        />
      </div>
      <Loaded of={diff}>
        {(data) => (
          <div class="section">
            <div class="cards">
              <section class="card">
                <h2>Counts</h2>
                <Pairs
                  rows={[
                    ...FIGURES.map(([name, about]): PairRow => [about, data.one[name], data.other[name]]),
                    ["mean reward", data.reward.means[0] ?? null, data.reward.means[1] ?? null],
                  ]}
                />
              </section>
              <section class="card">
                <h2>Left out, by reason</h2>
                <Reasons data={data} />
              </section>
              <section class="card">
                <h2>Sampled by</h2>
                {Object.keys(data.versions).length ? (
                  <Pairs rows={Object.entries(data.versions).map(([name, [a, b]]): PairRow => [name, a ?? 0, b ?? 0])} />
                ) : (
                  <Empty>No version sampled either: both are made of demonstrations.</Empty>
                )}
              </section>
              <section class="card">
                <h2>Recipes</h2>
                <Recipes data={data} />
              </section>
              <section class="card">
                <h2>Runs that fared otherwise</h2>
                <Moves data={data} />
              </section>
              <section class="card wide">
                <h2>Distributions</h2>
                <p class="legend">
                  <i class="one" /> {oneLine(one, 40)} <i class="other" /> {oneLine(other, 40)}
                </p>
                <div class="histograms">
                  <Overlaid name="reward of considered runs" data={data.reward} />
                  <Overlaid name="tokens of a sample" data={data.tokens} />
                  <Overlaid name="trained tokens of a sample" data={data.trained_tokens} />
                </div>
              </section>
            </div>
            <Runs one={one} other={other} counts={data.runs} params={params} />
          </div>
        )}
      </Loaded>
    </>
  );
}

type PairRow = [about: string, one: number | null, other: number | null];

function Pairs({ rows }: { rows: PairRow[] }) {
  return (
    <Table
      label="Figures of both"
      heads={["what", "before#", "after#", "difference#"]}
      rows={rows.map(([about, one, other]) => [
        oneLine(about, 60),
        compact(one),
        compact(other),
        one === null || other === null ? NONE : signed(other - one),
      ])}
    />
  );
}

function Reasons({ data }: { data: Differences }) {
  const names = [...new Set([...Object.keys(data.one.rejected), ...Object.keys(data.other.rejected)])].sort();
  if (!names.length) return <Empty>Neither left a run out.</Empty>;
  return (
    <Pairs
      rows={names.map((name): PairRow => [name.replace(/_/g, " "), data.one.rejected[name] ?? 0, data.other.rejected[name] ?? 0])}
    />
  );
}

function Recipes({ data }: { data: Differences }) {
  if (!data.recipe.length) return <Empty>Their recipes are equal: the runs differed.</Empty>;
  return (
    <dl class="facts">
      {data.recipe.map(({ field, one, other }) => (
        <div key={field} style={{ display: "contents" }}>
          <dt>{oneLine(field, 40)}</dt>
          <dd class="diff">
            <del>{oneLine(JSON.stringify(one) ?? "", 200)}</del> <ins>{oneLine(JSON.stringify(other) ?? "", 200)}</ins>
          </dd>
        </div>
      ))}
    </dl>
  );
}

/** What became of a run, in the words of the command line. */
function words(state: string): string {
  return state === "taken" ? "accepted" : oneLine(state.replace(/_/g, " "), 60);
}

function Moves({ data }: { data: Differences }) {
  if (!data.moves.length) return <Empty>Every run fared the same in both.</Empty>;
  return (
    <dl class="facts">
      {data.moves.slice(0, 100).map((move) => (
        <div key={move.before + move.after} style={{ display: "contents" }}>
          <dt class="number">{number(move.runs)}</dt>
          <dd>
            {words(move.before)} → {words(move.after)}
          </dd>
        </div>
      ))}
      <NotShown count={data.moves.length - 100} what="changes" />
    </dl>
  );
}

/** Two distributions in the same bins, each as shares of its own values. */
function Overlaid({ name, data }: { name: string; data: Compared }) {
  const { edges, one, other, means } = data;
  if (!edges.length) return <p class="hint">{name}: no values</p>;
  const shares = [one, other].map((counts) => {
    const total = counts.reduce((sum, count) => sum + count, 0);
    return counts.map((count) => (total ? count / total : 0));
  });
  const most = Math.max(...shares.flat(), 1e-9);
  return (
    <figure style={{ margin: "0 0 0.6rem" }}>
      <figcaption class="row">
        <b>{name}</b>
        <span class="spacer" />
        <span class="hint">
          {number(edges[0])} – {number(edges.at(-1))}, mean {number(means[0])} → {number(means[1])}
        </span>
      </figcaption>
      <svg
        class="histogram"
        viewBox={`0 0 ${one.length} 20`}
        preserveAspectRatio="none"
        role="img"
        aria-label={`${name}: mean ${number(means[0])} before, ${number(means[1])} after`}
      >
        {shares.map((list, which) =>
          list.map((share, n) => (
            <rect
              key={`${which}-${n}`}
              class={which ? "other" : "one"}
              x={n + 0.08 + 0.42 * which}
              width={0.42}
              y={20 - (19 * share) / most}
              height={(19 * share) / most}
            >
              <title>{`${number(edges[n])} to ${number(edges[n + 1])}: ${number((which ? other : one)[n])}, ${percent(share)}`}</title>
            </rect>
          )),
        )}
      </svg>
    </figure>
  );
}

function Runs(props: { one: string; other: string; counts: Differences["runs"]; params: URLSearchParams }) {
  const { one, other, counts, params } = props;
  const change = NAMES.find((name) => name === params.get("change"));
  const after = params.get("after") ?? "";
  const [marked, setMarked] = useState(-1);
  const query = { a: one, b: other, change, after: after || undefined, limit: PAGE };
  const runs = useResource(
    (signal) => get("/v1/datasets/diff/runs", { query: query as never, signal }),
    [one, other, change, after],
  );
  const rows = runs.data?.data ?? [];
  useKeys({
    j: ["next run", () => setMarked(Math.min(rows.length - 1, marked + 1))],
    k: ["previous run", () => setMarked(Math.max(0, marked - 1))],
    Enter: ["open the run", () => openRun(rows[marked]?.run)],
  });
  const choose = (name: Change | null) => setParams({ change: name, after: null });
  return (
    <section class="card wide">
      <div class="row" style={{ marginBottom: "0.5rem" }}>
        <h2 style={{ margin: 0 }}>Runs</h2>
        <button aria-pressed={!change} onClick={() => choose(null)}>
          not the same in both
        </button>
        {NAMES.map((name) => (
          <button key={name} aria-pressed={change === name} onClick={() => choose(name)}>
            {CHANGES[name]}: {number(counts[name])}
          </button>
        ))}
      </div>
      <Loaded of={runs}>
        {({ data, has_more }) =>
          data.length === 0 ? (
            <Empty>There is no such run.</Empty>
          ) : (
            <>
              <Table
                label="Runs of either set"
                heads={["run", "task", "before", "after", "reward#", "samples#"]}
                selected={marked}
                rows={data.map((row) => [
                  <RunLink id={row.run} />,
                  row.task ? oneLine(row.task, 40) : NONE,
                  words(row.before),
                  words(row.after),
                  pair(row.rewards),
                  pair(row.samples),
                ])}
              />
              <div class="row" style={{ marginTop: "0.5rem" }}>
                {after && <button onClick={() => setParams({ after: null })}>First ones</button>}
                {has_more && <button onClick={() => setParams({ after: data.at(-1)?.run })}>More</button>}
              </div>
            </>
          )
        }
      </Loaded>
    </section>
  );
}

/** Two values, or the one that both are. */
function pair([one, other]: (number | null)[]): string {
  return one === other ? number(one) : `${number(one)} → ${number(other)}`;
}
