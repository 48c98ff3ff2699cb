/** Run: one trajectory of the platform, read, rewarded, and opened in the playground. */
import { useState } from "preact/hooks";
import { CopyAs, quoted } from "../components/copy_as";
import { RewardDialog } from "../components/reward_dialog";
import type { Outline } from "../components/run_outline";
import { RunView, turnAt } from "../components/run_view";
import { Failure, Loaded } from "../components/states";
import { get } from "../lib/api";
import { useResource } from "../lib/resource";
import { go, href } from "../lib/route";
import type { ScreenProps } from ".";

const MARKS = 10_000; // in one answer of the outline

export default function RunScreen({ path, params }: ScreenProps) {
  const id = path[0] ?? "";
  const outline = useResource((signal) => loadOutline(id, signal), [id]);
  if (!id) return <Failure error={new Error("The address names no run.")} />;
  return (
    <Loaded of={outline} key={id}>
      {(data) => <Run key={id} outline={data} params={params} reload={outline.reload} />}
    </Loaded>
  );
}

async function loadOutline(id: string, signal: AbortSignal): Promise<Outline> {
  const sent = (from: number) => ({ path: { run_id: id }, query: { from, limit: MARKS }, signal });
  const first = await get("/v1/trajectories/{run_id}/outline", sent(0));
  let more = first.has_more;
  while (more) {
    const next = await get("/v1/trajectories/{run_id}/outline", sent(first.data.length));
    first.data.push(...next.data);
    more = next.has_more && next.data.length > 0;
  }
  return first;
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
