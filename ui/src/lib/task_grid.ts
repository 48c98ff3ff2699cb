/** Task grid: statistics by task and by version or iteration, as rows and columns. */
import type { components } from "./openapi";

export type Cell = components["schemas"]["StatsRow"];
export type Columns = "model" | "iteration";
export const ORDERS = ["task", "worst", "best", "spread", "runs"] as const;
export type Order = (typeof ORDERS)[number];

export interface TaskRow {
  task: string;
  /** The beginning of what its runs were asked. */
  input: string;
  cells: (Cell | undefined)[];
  runs: number;
  success: number | null;
  /** The best success of a column less the worst; null where fewer than two have one. */
  spread: number | null;
}

export interface TaskGrid {
  /** Without figures of their own: the columns' runs are of different tasks. */
  columns: string[];
  rows: TaskRow[];
  /** Runs without a task, or without an iteration where these are the columns. */
  without: number;
}

/** Return the name of a cell's column, null where it has none. */
function columnOf(cell: Cell, by: Columns): string | null {
  const value = by === "model" ? cell.model : cell.iteration;
  return value === null || value === undefined || value === "" ? null : String(value);
}

/** Compare `name@9` with `name@10` by name, then by number. */
export function compareVersions(one: string, other: string): number {
  const [a, n] = split(one);
  const [b, m] = split(other);
  return a < b ? -1 : a > b ? 1 : n - m;
}

function split(version: string): [string, number] {
  const match = /^(.*?)@?(\d+)$/.exec(version);
  return match ? [match[1]!, Number(match[2])] : [version, -1];
}

/** Return the success over some cells: each counts as often as it has rewarded runs. */
function successOf(cells: readonly (Cell | undefined)[]): number | null {
  let rewarded = 0;
  let succeeded = 0;
  for (const cell of cells) {
    if (!cell || cell.success === null) continue;
    rewarded += cell.rewarded;
    succeeded += cell.success * cell.rewarded;
  }
  return rewarded ? succeeded / rewarded : null;
}

const runsOf = (cells: readonly (Cell | undefined)[]): number => cells.reduce((sum, cell) => sum + (cell?.runs ?? 0), 0);

/** Return the grid of these groups with the last `most` columns. */
export function gridOf(groups: readonly Cell[], by: Columns, order: Order, most: number): TaskGrid {
  const byTask = new Map<string, Map<string, Cell>>();
  const names = new Set<string>();
  const inputs = new Map<string, string>();
  let without = 0;
  for (const cell of groups) {
    if (cell.task && cell.input) inputs.set(cell.task, cell.input);
    const column = columnOf(cell, by);
    if (!cell.task || column === null) {
      without += cell.runs;
      continue;
    }
    names.add(column);
    let row = byTask.get(cell.task);
    if (!row) byTask.set(cell.task, (row = new Map()));
    row.set(column, cell);
  }
  const columns = [...names].sort(compareVersions).slice(-most);
  const rows: TaskRow[] = [];
  for (const [task, found] of byTask) {
    const cells = columns.map((name) => found.get(name));
    const known = cells.flatMap((cell) => (cell && cell.success !== null ? [cell.success] : []));
    if (!cells.some(Boolean)) continue; // all of its runs are in columns left out
    rows.push({
      task,
      input: inputs.get(task) ?? "",
      cells,
      runs: runsOf(cells),
      success: successOf(cells),
      spread: known.length > 1 ? Math.max(...known) - Math.min(...known) : null,
    });
  }
  const last = (value: number | null, sign: 1 | -1) => (value === null ? 2 : sign * value); // unknown ones come last
  const measures: Record<Order, (row: TaskRow) => number> = {
    task: () => 0,
    worst: (row) => last(row.success, 1),
    best: (row) => last(row.success, -1),
    spread: (row) => last(row.spread, -1),
    runs: (row) => -row.runs,
  };
  const measure = measures[order];
  rows.sort((a, b) => measure(a) - measure(b) || compareVersions(a.input || a.task, b.input || b.task));
  return { columns, rows, without };
}
