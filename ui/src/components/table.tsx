/** Table: rows of cells under their heads, in a box that scrolls; and the way to the pages of a long list. */
import type { ComponentChildren } from "preact";
import { setParams } from "../lib/route";

export interface TableProps {
  label: string;
  /** The name of a column of numbers ends with `#`, which is not shown. */
  heads: readonly string[];
  rows: readonly (readonly ComponentChildren[])[];
  /** The place of the chosen row. */
  selected?: number;
}

export function Table({ label, heads, rows, selected }: TableProps) {
  const classes = heads.map((name) => (name.endsWith("#") ? "number" : ""));
  return (
    <div class="table-box" tabIndex={0} role="region" aria-label={label}>
      <table>
        <thead>
          <tr>
            {heads.map((name, at) => (
              <th key={at} class={classes[at]}>
                {name.replace(/#$/, "")}
              </th>
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

/** Buttons to the first and to the next page of a list, whose address has `after`. */
export function Pages({ after, next }: { after: string | null | undefined; next: string | false | undefined }) {
  return (
    <div class="row">
      {after && <button onClick={() => setParams({ after: null, at: null })}>Newest</button>}
      {next && <button onClick={() => setParams({ after: next, at: null })}>Older ones</button>}
    </div>
  );
}
