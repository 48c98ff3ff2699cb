/** Text: stored text of models, tools and people. It is never markup, and never hides or reorders anything. */
import { useState } from "preact/hooks";
import { bytes, plain } from "../lib/format";

const STEP = 50_000; // characters more at each click: a browser lays them out in a moment

/** A text of any size; beyond `lines` or `characters` it is cut, and opened step by step. */
export function Text(props: { text: string; lines?: number; characters?: number; label?: string }) {
  const { text, lines = 30, characters = 4000 } = props;
  const [limit, setLimit] = useState(0);
  const [cut, isCut] = limit ? [text.slice(0, limit), limit < text.length] : first(text, lines, characters);
  return (
    <div class={isCut ? "text cut" : "text"}>
      <div class="body" dir="auto">
        {plain(cut)}
      </div>
      {isCut && (
        <button class="more" onClick={() => setLimit((limit || cut.length) + STEP)}>
          Show more of {props.label ?? "it"}: {bytes(text.length - cut.length)} are folded
        </button>
      )}
      {limit > 0 && (
        <button class="more" onClick={() => setLimit(0)}>
          Fold
        </button>
      )}
    </div>
  );
}

function first(text: string, lines: number, characters: number): [string, boolean] {
  let end = -1;
  for (let n = 0; n < lines; n++) {
    end = text.indexOf("\n", end + 1);
    if (end < 0 || end > characters) break;
  }
  const at = end < 0 ? characters : Math.min(end, characters);
  return text.length > at ? [text.slice(0, at), true] : [text, false];
}
