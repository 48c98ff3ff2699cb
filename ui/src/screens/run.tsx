/** Run: one trajectory of the platform, read, rewarded, and opened in the playground. */
import { useEffect, useMemo, useState } from "preact/hooks";
import { CopyAs, quoted } from "../components/copy_as";
import { RewardDialog } from "../components/reward_dialog";
import type { Outline } from "../components/run_outline";
import { RunView, turnAt } from "../components/run_view";
import { Failure, Loaded } from "../components/states";
import { get } from "../lib/api";
import { useResource } from "../lib/resource";
import { go, href } from "../lib/route";
import type { ScreenProps } from ".";

const FIRST = 500; // marks before the run is shown
const MARKS = 10_000; // in one answer of the outline

export default function RunScreen({ path, params }: ScreenProps) {
  const id = path[0] ?? "";
  const first = useResource((signal) => marksFrom(id, 0, FIRST, signal), [id]);
  const whole = useWhole(first.data);
  if (!id) return <Failure error={new Error("The address names no run.")} />;
  return (
    <Loaded of={{ ...first, data: whole.outline }} key={id}>
      {(data) => (
        <>
          {whole.error && <Failure error={whole.error} retry={first.reload} />}
          <Run key={id} outline={data} params={params} reload={first.reload} />
        </>
      )}
    </Loaded>
  );
}

function marksFrom(id: string, from: number, limit: number, signal: AbortSignal): Promise<Outline> {
  return get("/v1/trajectories/{run_id}/outline", { path: { run_id: id }, query: { from, limit }, signal });
}

/** Return an outline that begins with the first marks, and grows as the others come. */
function useWhole(first: Outline | undefined): { outline?: Outline; error?: Error } {
  const [rest, setRest] = useState<{ id: string; marks: Outline["data"]; done: boolean; error?: Error }>({ id: "", marks: [], done: true });
  useEffect(() => {
    if (!first?.has_more) return;
    const { id } = first;
    const controller = new AbortController();
    const load = async () => {
      const marks: Outline["data"] = [];
      for (let done = false; !done; ) {
        const page = await marksFrom(id, first.data.length + marks.length, MARKS, controller.signal);
        marks.push(...page.data);
        done = !page.has_more || !page.data.length;
        // those of before stay until there are as many
        setRest((before) => (done || before.id !== id || before.marks.length < marks.length ? { id, marks: [...marks], done } : before));
      }
    };
    load().catch((error: Error) => controller.signal.aborted || setRest((before) => ({ ...before, error })));
    return () => controller.abort();
  }, [first]);
  const outline = useMemo(() => {
    if (!first?.has_more) return first;
    const known = rest.id === first.id;
    return { ...first, data: known ? [...first.data, ...rest.marks] : first.data, has_more: !known || !rest.done };
  }, [first, rest]);
  return { outline, error: rest.error };
}

function Run({ outline, params, reload }: { outline: Outline; params: URLSearchParams; reload: () => void }) {
  const { id } = outline;
  const at = turnAt(outline, params);
  const [version, setVersion] = useState(0);
  const [rewarding, setRewarding] = useState<{ value?: number } | null>(null);
  const again = () => setVersion((n) => n + 1);
  return (
    <>
      <RunView
        outline={outline}
        params={params}
        version={version}
        retry={again}
        keys={{
          r: ["reward the run or the turn", () => setRewarding({})],
          ...Object.fromEntries(
            [1, 2, 3, 4, 5].map((n) => [String(n), [`reward ${(n - 1) / 4}`, () => setRewarding({ value: (n - 1) / 4 })]]),
          ),
        }}
        actions={
          <>
            <button onClick={() => setRewarding({})}>Reward</button>
            <button onClick={() => go(href(["playground"], { run: id, t: at }))}>Playground</button>
            <CopyAs
              cli={`cray-agents runs show ${quoted(id)}`}
              python={`await Platform().run(${JSON.stringify(id)})`}
              path={`/v1/trajectories/${encodeURIComponent(id)}/turns?from=${at}&limit=1`}
            />
          </>
        }
      />
      {rewarding && (
        <RewardDialog
          run={id}
          turn={outline.turns ? at : undefined}
          value={rewarding.value}
          close={() => setRewarding(null)}
          done={() => {
            reload();
            again();
          }}
        />
      )}
    </>
  );
}
