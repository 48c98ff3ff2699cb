/** Runs: every stored run in a table, chosen by a line of text, by facets and by ranges. */
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { CopyAs } from "../components/copy_as";
import { FilterLine } from "../components/filter_line";
import { Histogram } from "../components/histogram";
import { RunHead, RunRow } from "../components/run_row";
import { Failure, Loaded } from "../components/states";
import { VirtualList } from "../components/virtual_list";
import { address, get } from "../lib/api";
import { onChange } from "../lib/events";
import { asOptions, parseFilter, term, withTerm, type Filter } from "../lib/filter";
import { compact, number, oneLine, percent } from "../lib/format";
import { useKeys } from "../lib/keyboard";
import type { components } from "../lib/openapi";
import type { RunFacts } from "../lib/records";
import { useResource } from "../lib/resource";
import { useSettled } from "../lib/settled";
import { go, href, setParams } from "../lib/route";
import { listed, listedMore } from "../lib/run_list";
import type { ScreenProps } from ".";

const PAGE = 200;
const FACETS = ["loop", "iteration", "model", "split", "stop_reason", "error", "agent", "tag"];
const HISTOGRAMS = ["reward", "seconds", "turns", "tokens"];
const SAMPLE = 100_000; // runs that histograms count
const SETTLED_MS = 250; // without a further change until a filter's runs are counted
const ORDERS = ["newest", "oldest", "task", "id"] as const;
type Order = (typeof ORDERS)[number];

export default function Runs({ params }: ScreenProps) {
  // links of other pages give the API's own parameters
  const line = params.get("q") ?? lineOf(params);
  const order = (params.get("order") as Order | null) ?? "newest";
  const filter = useMemo(() => parseFilter(line), [line]);
  const setLine = (text: string) => go(href(["runs"], { q: text, order: params.get("order") }), true);
  const { text: _, ...indexed } = filter.query;
  const path = address("/v1/trajectories", {}, { ...filter.query, order, view: "summary" });
  return (
    <div class="runs">
      <Side filter={indexed} line={line} setLine={setLine} hasText={"text" in filter.query} />
      <div class="list">
        <div class="row">
          <h1>Runs</h1>
          <FilterLine line={line} setLine={setLine} />
          <label>
            Order{" "}
            <select value={order} onChange={(event) => setParams({ order: event.currentTarget.value })}>
              {ORDERS.map((one) => (
                <option key={one}>{one}</option>
              ))}
            </select>
          </label>
          <CopyAs
            cli={`cray-agents runs list ${asOptions(filter.query)}`.trim()}
            python={`[run async for run in Platform().runs(${JSON.stringify(filter.query)})]`}
            path={path}
          />
        </div>
        {filter.problem ? (
          <Failure error={new Error(filter.problem)} />
        ) : (
          <Table key={line + order} filter={filter} order={order} at={params.get("at")} />
        )}
      </div>
    </div>
  );
}

/** Return the filter line of a URL that has the API's parameters, as links of warnings have. */
function lineOf(params: URLSearchParams): string {
  const terms: string[] = [];
  for (const [name, value] of params) {
    const bound = /^(min|max)_(\w+)$/.exec(name);
    if (bound) terms.push(`${bound[2]}${bound[1] === "min" ? ">=" : "<="}${value}`);
    else if (name === "since" || name === "until") {
      terms.push(`started${name === "since" ? ">=" : "<="}${new Date(Number(value) * 1000).toISOString()}`);
    } else if (!["order", "at", "q"].includes(name)) terms.push(term(name, value));
  }
  return terms.join(" and ");
}

function Side(props: { filter: Filter["query"]; line: string; setLine: (text: string) => void; hasText: boolean }) {
  const { filter, line, setLine, hasText } = props;
  const stats = useResource(
    (signal) =>
      get("/v1/trajectories/stats", {
        query: {
          ...filter,
          facets: FACETS.join(),
          histograms: HISTOGRAMS.join(),
          bins: 24,
          sample: SAMPLE,
          percentiles: "false",
          limit: 1,
        } as never,
        signal,
      }),
    [useSettled(filter, SETTLED_MS)],
    ["run"],
  );
  return (
    <aside class="side" aria-label="Facets">
      <Loaded of={stats}>
        {(data) => (
          <>
            <p>
              <b>{number(data.total)}</b> runs{hasText && <span class="hint"> without the search for texts</span>}
            </p>
            {data.data[0] && <Success of={data.data[0]} />}
            {HISTOGRAMS.map((name) => {
              const histogram = data.histograms[name];
              return (
                histogram && (
                  <Histogram
                    key={name}
                    name={name}
                    data={histogram}
                    onRange={(least, most, last) =>
                      setLine(withTerm(line, name, `${name}>=${round(least)} and ${name}${last ? "<=" : "<"}${round(most)}`))
                    }
                  />
                )
              );
            })}
            {FACETS.map((name) => (
              <Facet key={name} name={name} values={data.facets[name] ?? []} line={line} setLine={setLine} />
            ))}
          </>
        )}
      </Loaded>
    </aside>
  );
}

/** How many of the runs with a reward succeed: those without one are in no share and no mean. */
function Success({ of }: { of: components["schemas"]["StatsRow"] }) {
  const { runs, rewarded } = of;
  if (!rewarded) return <p class="quiet">None has a reward.</p>;
  return (
    <p class="quiet">
      {percent(of.success)} of {rewarded < runs ? `the ${number(rewarded)} with a reward` : "them"} succeed · mean reward{" "}
      {number(of.mean_reward)}
      {rewarded < runs && ` · ${number(runs - rewarded)} have no reward`}
    </p>
  );
}

function round(value: number): number {
  return Number(value.toPrecision(6));
}

function Facet(props: {
  name: string;
  values: { value: string | number | null; runs: number }[];
  line: string;
  setLine: (text: string) => void;
}) {
  const { name, line, setLine } = props;
  const values = props.values.filter((one) => one.value !== null && one.value !== "");
  if (!values.length) return null;
  return (
    <section class="facet">
      <h3>{name}</h3>
      <ul>
        {values.slice(0, 12).map(({ value, runs }) => {
          const mine = term(name, String(value));
          const chosen = line.includes(mine);
          return (
            <li key={String(value)}>
              <button aria-pressed={chosen} onClick={() => setLine(withTerm(line, name, chosen ? null : mine))}>
                <span class="value">{oneLine(String(value), 60)}</span>
                <span class="quiet">{compact(runs)}</span>
              </button>
            </li>
          );
        })}
      </ul>
      {values.length > 12 && <p class="hint">{values.length - 12} more: write {name}:… in the filter</p>}
    </section>
  );
}

interface Pages {
  rows: RunFacts[];
  more: boolean;
  error?: Error;
}

function Table({ filter, order, at }: { filter: Filter; order: Order; at: string | null }) {
  const [pages, setPages] = useState<Pages>({ rows: [], more: true });
  const [fresh, setFresh] = useState(0);
  const [times, setTimes] = useState(0);
  const [marked, setMarked] = useState<string[]>([]);
  const loading = useRef<AbortController | null>(null);
  const { rows, more, error } = pages;
  const load = (after: string | undefined, before: RunFacts[]) => {
    if (loading.current) return;
    const controller = (loading.current = new AbortController());
    get("/v1/trajectories", {
      query: { ...filter.query, order, view: "summary", limit: PAGE, after } as never,
      signal: controller.signal,
    })
      .then(
        (page) => setPages({ rows: [...before, ...(page.data as unknown as RunFacts[])], more: page.has_more }),
        (problem: Error) => controller.signal.aborted || setPages({ rows: before, more: false, error: problem }),
      )
      .finally(() => (loading.current = null));
  };
  useEffect(() => {
    load(undefined, []);
    return () => {
      loading.current?.abort();
      loading.current = null;
    };
  }, [times]);
  useEffect(() => onChange(({ kind }) => kind === "run" && setFresh((n) => n + 1)), []);
  useEffect(() => {
    listed.value = rows.map((row) => row.id);
    listedMore.value = more;
  }, [rows, more]);
  const selected = Math.max(0, at ? rows.findIndex((row) => row.id === at) : 0);
  const select = (n: number) => {
    const row = rows[Math.min(rows.length - 1, Math.max(0, n))];
    if (row) setParams({ at: row.id });
  };
  const mark = (id: string) =>
    setMarked((before) => (before.includes(id) ? before.filter((one) => one !== id) : [...before, id].slice(-2)));
  const compare = () => marked.length === 2 && go(href(["compare"], { a: marked[0], b: marked[1] }));
  useKeys({
    j: ["next run", () => select(selected + 1)],
    k: ["previous run", () => select(selected - 1)],
    Enter: ["open the run", () => rows[selected] && go(href(["run", rows[selected].id]))],
    x: ["mark the run, to compare two", () => rows[selected] && mark(rows[selected].id)],
    c: ["compare the two marked runs", compare],
  });
  if (error) return <Failure error={error} retry={() => setTimes((n) => n + 1)} />;
  return (
    <>
      <div class="row" aria-live="polite">
        {fresh > 0 && (
          <button
            onClick={() => {
              setFresh(0);
              setTimes((n) => n + 1);
            }}
          >
            {fresh} new changes: load the runs again
          </button>
        )}
        {marked.length > 0 && (
          <span>
            {marked.length} marked{" "}
            <button disabled={marked.length < 2} onClick={compare}>
              Compare
            </button>
          </span>
        )}
        {!rows.length && <span class="quiet">{more ? "Loading …" : "No run matches."}</span>}
      </div>
      <RunHead />
      <VirtualList
        label="Runs"
        count={rows.length}
        estimate={31}
        keyOf={(n) => rows[n]?.id ?? n}
        selected={at ? selected : undefined}
        onRange={(_, last) => more && rows.length > 0 && last > rows.length - 50 && load(rows.at(-1)?.id, rows)}
        row={(n) => rows[n] && <RunRow run={rows[n]} selected={n === selected} marked={marked.includes(rows[n].id)} />}
      />
    </>
  );
}
