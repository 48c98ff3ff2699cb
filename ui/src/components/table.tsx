/** Table: rows of cells under their heads, in a box that scrolls; and the way to the pages of a long list. */
import type { ComponentChildren } from "preact";
import { setParams } from "../lib/route";

export function Table(props: { label: string; heads: readonly string[]; rows: readonly (readonly ComponentChildren[])[] }) {
  return (
    <div class="table-box" tabIndex={0} role="region" aria-label={props.label}>
      <table>
        <thead>
          <tr>
            {props.heads.map((name) => (
              <th key={name}>{name}</th>
            ))}
          </tr>
        </thead>
        <tbody>
          {props.rows.map((cells, n) => (
            <tr key={n}>
              {cells.map((cell, at) => (
                <td key={at}>{cell}</td>
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
