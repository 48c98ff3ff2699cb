/** Search: texts of runs. Ids are opened at once; hits come page by page, as far as was asked. */
import { useEffect, useRef, useState } from "preact/hooks";
import { Failure } from "../components/states";
import { get } from "../lib/api";
import { oneLine, time } from "../lib/format";
import { useKeys } from "../lib/keyboard";
import type { RunFacts } from "../lib/records";
import { go, href } from "../lib/route";
import type { ScreenProps } from ".";

const PAGE = 20;

export default function Search({ params }: ScreenProps) {
  const q = params.get("q") ?? "";
  const [text, setText] = useState(q);
  const input = useRef<HTMLInputElement>(null);
  useKeys({ "/": ["search", () => input.current?.focus()] });
  return (
    <>
      <form
        class="row"
        onSubmit={(event) => {
          event.preventDefault();
          go(href(["search"], { q: text.trim() }));
        }}
      >
        <h1>Search</h1>
        <input
          ref={input}
          class="filter"
          style={{ flex: "1" }}
          type="search"
          aria-label="Words in inputs, outputs and messages of runs"
          placeholder="words in inputs, outputs and messages"
          value={text}
          onInput={(event) => setText(event.currentTarget.value)}
        />
        <button class="primary">Search</button>
      </form>
      {q && <Hits key={q} q={q} />}
    </>
  );
}

function Hits({ q }: { q: string }) {
  const [rows, setRows] = useState<RunFacts[]>([]);
  const [more, setMore] = useState(true);
  const [error, setError] = useState<Error>();
  const [busy, setBusy] = useState(false);
  const controller = useRef(new AbortController());
  const load = async (before: RunFacts[]) => {
    setBusy(true);
    setError(undefined);
    try {
      const page = await get("/v1/trajectories", {
        query: { text: q, view: "summary", order: "newest", limit: PAGE, after: before.at(-1)?.id },
        signal: controller.current.signal,
      });
      setRows([...before, ...(page.data as unknown as RunFacts[])]);
      setMore(page.has_more);
    } catch (problem) {
      if (!controller.current.signal.aborted) setError(problem as Error);
    }
    setBusy(false);
  };
  useEffect(() => {
    controller.current = new AbortController();
    void load([]);
    return () => controller.current.abort();
  }, []);
  const words = q.replace(/\s+/g, " ").trim(); // the text that is looked for, as a whole
  return (
    <>
      <p role="status" class="quiet">
        {busy ? "Reads the runs …" : `${rows.length} runs${more ? ", and more" : ""} with "${oneLine(q, 60)}"`}
      </p>
      {error && <Failure error={error} retry={() => void load(rows)} />}
      <ul class="palette">
        {rows.map((run) => (
          <li key={run.id}>
            <a href={href(["run", run.id])} dir="auto">
              <Marked text={oneLine(run.input, 120) || oneLine(run.id)} words={words} />
            </a>{" "}
            <span class="quiet">
              {oneLine(run.model, 40)} {time(run.started)}
            </span>
            <div class="quiet" dir="auto">
              <Marked text={oneLine(run.output, 200)} words={words} />
                          </div>
            {run.found && !has(`${oneLine(run.input, 120)} ${oneLine(run.output, 200)}`, words) && (
              <div class="quiet" dir="auto">
                … <Marked text={oneLine(run.found, 400)} words={words} /> …
              </div>
            )}
          </li>
        ))}
      </ul>
      {more && rows.length > 0 && rows.length < 400 && (
        <button disabled={busy} onClick={() => void load(rows)}>
          Search on, from {time(rows.at(-1)?.started)}
        </button>
      )}
      {rows.length >= 400 && <p class="hint">For more, narrow the search in the list of runs.</p>}
    </>
  );
}

function has(text: string, words: string): boolean {
  return text.replace(/\s+/g, " ").toLowerCase().includes(words.toLowerCase());
}

/** A text with the words that were searched marked in it. */
function Marked({ text, words }: { text: string; words: string }) {
  const escaped = words.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
  if (!escaped) return <>{text}</>;
  // what is matched stands at the odd places
  const pieces = text.split(new RegExp(`(${escaped})`, "i"));
  return <>{pieces.map((piece, n) => (n % 2 ? <mark key={n}>{piece}</mark> : piece))}</>;
}
