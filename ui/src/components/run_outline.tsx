/** Run outline: a mark for each turn of a run, with a box that finds some of them. */
import { useMemo, useRef, useState } from "preact/hooks";
import { compact, number, oneLine } from "../lib/format";
import { useKeys } from "../lib/keyboard";
import type { components } from "../lib/openapi";
import { VirtualList } from "./virtual_list";

export type Outline = components["schemas"]["RunOutline"];

export function OutlineList({ outline, at, goTo }: { outline: Outline; at: number; goTo: (n: number) => void }) {
  const [text, setText] = useState("");
  const input = useRef<HTMLInputElement>(null);
  useKeys({ "/": ["find in the outline", () => input.current?.focus()] });
  const marks = useMemo(() => {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) return outline.data;
    return outline.data.filter((mark) => {
      const line = [
        mark.n + 1,
        ...(mark.tools ?? []),
        mark.model ?? "",
        mark.finish ?? "",
        mark.errors ? "error failed" : "",
        mark.seams?.length ? "seam" : "",
        mark.reward !== null && mark.reward !== undefined ? "reward" : "",
      ]
        .join(" ")
        .toLowerCase();
      return words.every((word) => line.includes(word));
    });
  }, [outline, text]);
  return (
    <aside class="outline" aria-label="Outline">
      <input
        ref={input}
        type="search"
        aria-label="Find in the outline: a tool, error, seam, reward"
        placeholder="tool, error, seam, reward …"
        value={text}
        onInput={(event) => setText(event.currentTarget.value)}
      />
      <VirtualList
        label="Turns"
        count={marks.length}
        estimate={30}
        keyOf={(n) => marks[n]?.n ?? n}
        selected={marks.findIndex((mark) => mark.n === at)}
        row={(n) => {
          const mark = marks[n];
          return (
            mark && (
              <button
                class={`mark ${mark.n === at ? "selected" : ""} ${mark.errors ? "failed" : ""}`}
                aria-current={mark.n === at ? "true" : undefined}
                onClick={() => goTo(mark.n)}
              >
                <span class="line">
                  <span>
                    {mark.n + 1} {oneLine((mark.tools ?? []).join(", ") || mark.finish || (mark.missing ? "not recorded" : ""), 60)}
                    {(mark.calls ?? 0) > (mark.tools?.length ?? 0) && ` +${(mark.calls ?? 0) - (mark.tools?.length ?? 0)}`}
                  </span>
                  {(mark.seams?.length ?? 0) > 0 && <span class="chip bad">seam</span>}
                  {mark.reward !== null && mark.reward !== undefined && <span class="chip fair">{number(mark.reward)}</span>}
                  <span class="quiet">{compact(mark.sampled ?? 0)}</span>
                </span>
              </button>
            )
          );
        }}
      />
      {outline.data.length !== marks.length && (
        <p class="hint">
          {marks.length} of {outline.data.length} turns
        </p>
      )}
      {outline.has_more && <p class="hint">The outline loads …</p>}
    </aside>
  );
}
