/** Tasks: how often each task succeeds, by version or by iteration; a cell leads to its runs. */
import { useMemo } from "preact/hooks";
import { CopyAs } from "../components/copy_as";
import { FilterLine } from "../components/filter_line";
import { Empty, Failure, Loaded } from "../components/states";
import { VirtualList } from "../components/virtual_list";
import { address, get } from "../lib/api";
import { asOptions, parseFilter, term, withTerm } from "../lib/filter";
import { compact, NONE, number, oneLine, percent } from "../lib/format";
import { useKeys } from "../lib/keyboard";
import { useResource } from "../lib/resource";
import { go, href, setParams } from "../lib/route";
import { gridOf, ORDERS, type Cell, type Columns, type Order, type TaskGrid } from "../lib/task_grid";
import type { ScreenProps } from ".";

const GROUPS = 10_000; // cells in an answer, at most
const COLUMNS = 30; // in the page
const ORDER_NAMES: Record<Order, string> = {
  task: "name",
  worst: "worst first",
  best: "best first",
  spread: "most different first",
  runs: "most runs first",
};

export default function Tasks({ params }: ScreenProps) {
  const line = params.get("q") ?? "";
  const by: Columns = params.get("by") === "iteration" ? "iteration" : "model";
  const order = ORDERS.find((one) => one === params.get("order")) ?? "task";
  const filter = useMemo(() => parseFilter(line), [line]);
  const { text, ...query } = filter.query;
  const problem = filter.problem ?? (text === undefined ? null : `"${text}" is a text: tasks are counted without reading texts`);
  const asked = { ...query, by: `task,${by}`, limit: GROUPS, percentiles: "false" };
  const stats = useResource(
    (signal) =>
      problem ? Promise.reject(new Error(problem)) : get("/v1/trajectories/stats", { query: asked as never, signal }),
    [query, by, problem],
    ["run"],
  );
  const grid = useMemo(
    () => stats.data && gridOf(stats.data.data, by, order, COLUMNS),
    [stats.data, by, order],
  );
  return (
    <div class="list">
      <div class="row">
        <h1>Tasks</h1>
        <FilterLine line={line} setLine={(q) => setParams({ q, row: null, col: null })} />
        <label>
          Columns{" "}
          <select value={by} onChange={(event) => setParams({ by: event.currentTarget.value, col: null })}>
            <option value="model">versions</option>
            <option value="iteration">iterations</option>
          </select>
        </label>
        <label>
          Order{" "}
          <select value={order} onChange={(event) => setParams({ order: event.currentTarget.value })}>
            {ORDERS.map((one) => (
              <option key={one} value={one}>
                {ORDER_NAMES[one]}
              </option>
            ))}
          </select>
        </label>
        <CopyAs
          cli={`cray-agents runs stats --by task,${by} ${asOptions(query)}`.trim()}
          python={`await Platform().views.stats("task,${by}", **${JSON.stringify(query)})`}
          path={address("/v1/trajectories/stats", {}, asked)}
        />
      </div>
      {problem ? (
        <Failure error={new Error(problem)} />
      ) : (
        <Loaded of={stats}>
          {(data) =>
            grid && grid.rows.length ? (
              <>
                <p class="quiet" role="status">
                  {number(grid.rows.length)} tasks · {number(grid.columns.length)} {by === "model" ? "versions" : "iterations"}
                  {grid.without > 0 && ` · ${compact(grid.without)} runs have no task${by === "model" ? "" : " or iteration"}`}
                  {grid.columns.length === COLUMNS && ` · at most the last ${COLUMNS} are shown`}
                  {data.has_more && ` · the ${compact(GROUPS)} largest cells are counted: a filter shows the others`}
                </p>
                <Grid grid={grid} by={by} line={line} params={params} />
              </>
            ) : (
              <Empty>No run of a task matches.</Empty>
            )
          }
        </Loaded>
      )}
    </div>
  );
}

function Grid({ grid, by, line, params }: { grid: TaskGrid; by: Columns; line: string; params: URLSearchParams }) {
  const { columns, rows } = grid;
  const row = rows.findIndex((one) => one.task === params.get("row"));
  const column = columns.indexOf(params.get("col") ?? "");
  const select = (toRow: number, toColumn: number) =>
    setParams({
      row: rows[Math.min(rows.length - 1, Math.max(0, toRow))]?.task,
      col: columns[Math.min(columns.length - 1, Math.max(0, toColumn))],
    });
  const runsOf = (task?: string, name?: string) => {
    let wanted = line;
    if (task !== undefined) wanted = withTerm(wanted, "task", term("task", task));
    if (name !== undefined) wanted = withTerm(wanted, by, term(by, name));
    return href(["runs"], { q: wanted });
  };
  const [atRow, atColumn] = [Math.max(0, row), Math.max(0, column)];
  useKeys({
    j: ["next task", () => select(row < 0 ? 0 : row + 1, atColumn)],
    k: ["previous task", () => select(atRow - 1, atColumn)],
    l: [by === "model" ? "next version" : "next iteration", () => select(atRow, column < 0 ? 0 : column + 1)],
    h: [by === "model" ? "previous version" : "previous iteration", () => select(atRow, atColumn - 1)],
    Enter: ["the runs of the cell", () => row >= 0 && go(runsOf(rows[row]!.task, columns[column]))],
  });
  return (
    <div class="task-grid" style={{ "--columns": columns.length }}>
      <VirtualList
        label="Success by task"
        count={rows.length}
        estimate={33}
        keyOf={(n) => rows[n]?.task ?? n}
        selected={row < 0 ? undefined : row}
        head={
          <div class="grid-row" role="presentation">
            <span role="columnheader">
              task <span class="quiet">· all {number(rows.length)}</span>
            </span>
            {columns.map((name) => (
              <span key={name} role="columnheader">
                <a class="name" href={runsOf(undefined, name)} title={oneLine(name, 100)}>
                  {oneLine(name, 40)}
                </a>
              </span>
            ))}
          </div>
        }
        row={(n) => {
          const one = rows[n];
          if (!one) return null;
          return (
            <div class="grid-row" role="presentation">
              <span role="rowheader">
                <a href={runsOf(one.task)} title={oneLine(`${one.input} · ${one.task}`, 300)} dir="auto">
                  {oneLine(one.input || one.task, 80)}
                </a>
              </span>
              {columns.map((name, at) => (
                <span key={name} role="cell">
                  <CellView cell={one.cells[at]} to={runsOf(one.task, name)} selected={n === row && at === column} />
                </span>
              ))}
            </div>
          );
        }}
      />
    </div>
  );
}

function CellView({ cell, to, selected }: { cell: Cell | undefined; to: string; selected: boolean }) {
  if (!cell) return <span class={`cell none ${selected ? "selected" : ""}`}>{NONE}</span>;
  const about = `${number(cell.rewarded)} of ${number(cell.runs)} runs rewarded, mean ${number(cell.mean_reward)}${cell.errors ? `, ${number(cell.errors)} with errors` : ""}`;
  return (
    <a class={`cell ${toneOf(cell.success)} ${selected ? "selected" : ""}`} href={to} title={about}>
      {cell.success === null ? "no reward" : percent(cell.success)}
      <span class="quiet"> {compact(cell.runs)}</span>
    </a>
  );
}

/** Return the class of a success: five shades from none to all. */
function toneOf(success: number | null): string {
  if (success === null) return "none";
  return `rate${success <= 0 ? 0 : success >= 1 ? 4 : success < 1 / 3 ? 1 : success < 2 / 3 ? 2 : 3}`;
}
