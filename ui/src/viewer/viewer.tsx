/** Viewer: the pages of a file of runs: their list, and each of them; nothing is asked of anybody. */
import { useEffect, useState } from "preact/hooks";
import { Help } from "../components/help";
import { RunView } from "../components/run_view";
import { Empty, Failure, Loaded } from "../components/states";
import { get } from "../lib/api";
import { number } from "../lib/format";
import { useKeys } from "../lib/keyboard";
import { useResource } from "../lib/resource";
import { href, route } from "../lib/route";
import { listed } from "../lib/run_list";
import { nextTheme, theme } from "../lib/theme";
import { isFull, runs } from "./file_answers";
import { FileRuns } from "./file_runs";

export function Viewer() {
  const [help, setHelp] = useState(false);
  useKeys({ "?": ["show this help", () => setHelp(true)], "t": ["change the theme", nextTheme] });
  const { path, params } = route.value;
  const only = runs.length === 1 && runs[0] ? runs[0].id : undefined;
  const id = path[0] === "run" ? path[1] : only;
  useEffect(() => {
    document.title = `${id ?? "Runs"} · cray-agents`;
    if (!listed.peek().length) listed.value = runs.map((one) => one.id);
  }, [id]);
  return (
    <div class="frame">
      <header class="top">
        <span class="brand">cray-agents</span>
        {runs.length > 1 && (
          <nav aria-label="Screens">
            <a href={href(["runs"])} aria-current={id ? undefined : "page"}>
              {number(runs.length)} runs
            </a>
          </nav>
        )}
        <span class="spacer" />
        <span class="quiet">a file: it asks nobody</span>
        <button onClick={nextTheme} title="Theme: auto, light, dark">
          {theme.value}
        </button>
        <button onClick={() => setHelp(true)} aria-label="Help: keys">
          ?
        </button>
      </header>
      <main id="main" tabIndex={-1}>
        {isFull && <p class="banner">The file was full before all runs were in it. An export of fewer runs has them all.</p>}
        {!runs.length ? <Empty>No run is in this file.</Empty> : id ? <OneRun key={id} id={id} params={params} /> : <FileRuns params={params} />}
      </main>
      {help && <Help close={() => setHelp(false)} />}
    </div>
  );
}

function OneRun({ id, params }: { id: string; params: URLSearchParams }) {
  const known = runs.find((one) => one.id === id);
  const outline = useResource(() => get("/v1/trajectories/{run_id}/outline", { path: { run_id: id } }), [id]);
  if (!known) return <Failure error={new Error(`The run ${id} is not in this file.`)} />;
  return (
    <>
      {known.included < known.turns && (
        <p class="banner">
          The first {number(known.included)} of {number(known.turns)} turns are in this file.
        </p>
      )}
      <Loaded of={outline}>{(data) => <RunView outline={data} params={params} retry={outline.reload} />}</Loaded>
    </>
  );
}
