/** Table: rows of cells under their heads, in a box that scrolls; their order; and the way to the pages of a long list. */
import type { ComponentChildren } from "preact";
import { route, setParams } from "../lib/route";

/** What rows are sorted by, under the names of the columns. */
type Columns<Row> = Record<string, (row: Row) => number | string | null | undefined>;

/** The columns that rows can be sorted by, and the one that they are sorted by; `down`: the largest first. */
export interface Sort {
  columns: readonly string[];
  column: string | undefined;
  down: boolean;
}

/** Return rows in the order that the address asks for: `sort=COLUMN`, or `sort=-COLUMN` for the largest first.
 *
 * Rows without a value come last. `whole`: there are no further rows. A page of a longer list stays as it is: its first
 * row would not be the first of all.
 */
export function sorted<Row>(rows: readonly Row[], by: Columns<Row>, whole: boolean): [readonly Row[], Sort | undefined] {
  if (!whole) return [rows, undefined];
  const asked = route.value.params.get("sort") ?? "";
  const [columns, down] = [Object.keys(by), asked.startsWith("-")];
  const column = columns.find((name) => name === asked.replace(/^-/, ""));
  const value = column === undefined ? () => null : by[column]!;
  const compare = (one: Row, other: Row) => {
    const [a, b] = [value(one) ?? null, value(other) ?? null];
    if (a === null || b === null) return Number(a === null) - Number(b === null);
    const order = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
    return down ? -order : order;
  };
  return [[...rows].sort(compare), { columns, column, down }];
}

export interface TableProps {
  label: string;
  /** The name of a column of numbers ends with `#`, which is not shown. */
  heads: readonly string[];
  rows: readonly (readonly ComponentChildren[])[];
  /** Of `sorted`, which gave the rows their order. */
  sort?: Sort;
  /** The place of the chosen row. */
  selected?: number;
}

export function Table({ label, heads, rows, selected, sort }: TableProps) {
  const classes = heads.map((name) => (name.endsWith("#") ? "number" : ""));
  return (
    <div class="table-box" tabIndex={0} role="region" aria-label={label}>
      <table>
        <thead>
          <tr>
            {heads.map((name, at) => (
              <Head key={at} name={name.replace(/#$/, "")} sort={sort} class={classes[at]} />
            ))}
          </tr>
        </thead>
        <tbody>
          {rows.map((cells, n) => (
            <tr key={n} class={n === selected ? "selected" : ""}>
              {cells.map((cell, at) => (
                <td key={at} class={classes[at]}>
                  {cell}
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

/** The head of a column. Where rows can be sorted by it, clicks do: the least first, the largest first, not at all. */
export function Head({ name, sort, ...rest }: { name: string; sort: Sort | undefined; class?: string; title?: string }) {
  if (!sort?.columns.includes(name)) return <th {...rest}>{name}</th>;
  const chosen = sort.column === name;
  const next = !chosen ? name : sort.down ? null : `-${name}`;
  return (
    <th {...rest} aria-sort={chosen ? (sort.down ? "descending" : "ascending") : undefined}>
      <button class="sort" onClick={() => setParams({ sort: next })}>
        {name}
        {chosen && <span aria-hidden="true">{sort.down ? " ▼" : " ▲"}</span>}
      </button>
    </th>
  );
}

/** Buttons to the first and to the next page of a list, whose address has `after`. */
export function Pages({ after, next }: { after: string | null | undefined; next: string | false | undefined }) {
  return (
    <div class="row">
      {after && <button onClick={() => setParams({ after: null, at: null })}>Newest</button>}
      {next && <button onClick={() => setParams({ after: next, at: null })}>Older ones</button>}
    </div>
  );
}
