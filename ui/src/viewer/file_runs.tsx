/** File runs: the list of the runs in a file, with a box that finds some of them. */
import { useEffect, useMemo, useRef } from "preact/hooks";
import { RunHead, RunRow } from "../components/run_row";
import { VirtualList } from "../components/virtual_list";
import { number } from "../lib/format";
import { useKeys } from "../lib/keyboard";
import { go, href, setParams } from "../lib/route";
import { listed } from "../lib/run_list";
import { runs, type FileRun } from "./file_answers";

export function FileRuns({ params }: { params: URLSearchParams }) {
  const text = params.get("q") ?? "";
  const input = useRef<HTMLInputElement>(null);
  const found = useMemo(() => {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    return runs.filter((one) => words.every((word) => lineOf(one).includes(word)));
  }, [text]);
  useEffect(() => void (listed.value = found.map((one) => one.id)), [found]);
  const at = Math.max(0, found.findIndex((one) => one.id === params.get("at")));
  const select = (n: number) => {
    const one = found[Math.min(found.length - 1, Math.max(0, n))];
    if (one) setParams({ at: one.id });
  };
  useKeys({
    "/": ["find runs", () => input.current?.focus()],
    j: ["next run", () => select(at + 1)],
    k: ["previous run", () => select(at - 1)],
    Enter: ["open the run", () => found[at] && go(href(["run", found[at].id]))],
  });
  return (
    <div class="list">
      <div class="row">
        <h1>Runs</h1>
        <input
          ref={input}
          class="filter"
          type="search"
          aria-label="Find runs: words of input, output, agent, model, loop, task, tag, error"
          placeholder="words of input, output, model, task, tag, error"
          value={text}
          onInput={(event) => setParams({ q: event.currentTarget.value })}
        />
        <span class="quiet" role="status">
          {number(found.length)} of {number(runs.length)}
        </span>
      </div>
      <RunHead />
      <VirtualList
        label="Runs"
        count={found.length}
        estimate={31}
        keyOf={(n) => found[n]?.id ?? n}
        selected={params.get("at") ? at : undefined}
        row={(n) => found[n] && <RunRow run={found[n].run} selected={n === at} />}
      />
    </div>
  );
}

function lineOf({ run }: FileRun): string {
  const { id, input, output, agent, model, loop, task, tags, error, stop_reason } = run;
  return [id, input, output, agent, model, loop, task, ...(tags ?? []), error, stop_reason].join(" ").toLowerCase();
}
