/** Token panel: the tokens of a turn with the choice of their colour, and the facts of one token. */
import { useState } from "preact/hooks";
import { get, post } from "../lib/api";
import { useResource } from "../lib/resource";
import { setParams } from "../lib/route";
import { features } from "../lib/session";
import { differencesOf } from "./agreed";
import { Failure, Loaded } from "./states";
import { Legend, MEASURES, TokenFacts, Tokens, type Measure } from "./tokens";

export function TokenPanel(props: { id: string; n: number; params: URLSearchParams; token: number | null; version: string | null }) {
  const { id, n, params, token, version } = props;
  const measure = (params.get("color") as Measure | null) ?? "logprob";
  const prompt = params.get("prompt") === "1";
  const other = params.get("against"); // an engine is asked when the address says so, for it may have to load the version
  const tokens = useResource(
    (signal) =>
      get("/v1/trajectories/{run_id}/turns/{number}/tokens", {
        path: { run_id: id, number: n },
        query: { prompt: prompt ? "true" : "false" } as never,
        signal,
      }),
    [id, n, prompt],
  );
  const job = params.get("job"); // whose differences of trainer and sampler are shown
  const compared = useResource(async (signal) => (job ? get("/v1/jobs/{job_id}", { path: { job_id: job }, signal }) : null), [job]);
  const trainer = compared.data ? new Map(differencesOf(compared.data).flatMap(([run, place, ours]): [number, number][] => (run === id ? [[place, ours]] : []))) : undefined;
  const canScore = features.value.includes("score");
  const scored = isScored(measure);
  const score = useResource(
    (signal) =>
      scored && other
        ? post("/v1/trajectories/{run_id}/turns/{number}/score", {
            path: { run_id: id, number: n },
            body: { model: other, top: 5 },
            signal,
          })
        : Promise.resolve(undefined),
    [id, n, scored, other],
  );
  const [text, setText] = useState(other ?? version ?? "");
  return (
    <>
      <div class="row">
        <label>
          Colour{" "}
          <select
            value={measure}
            onChange={(event) => setParams({ color: event.currentTarget.value })}
          >
            {Object.entries(MEASURES)
              .filter(([name]) => name !== "advantage" && (job || name !== "trainer") && (canScore || name === measure || !isScored(name as Measure)))
              .map(([name, about]) => (
                <option key={name} value={name}>
                  {about}
                </option>
              ))}
          </select>
        </label>
        {scored && (
          <form
            class="row"
            onSubmit={(event) => {
              event.preventDefault();
              setParams({ against: text });
            }}
          >
            <label>
              Version{" "}
              <input value={text} placeholder="name@N" onInput={(event) => setText(event.currentTarget.value)} />
            </label>
            <button>Score</button>
          </form>
        )}
        <label>
          <input type="checkbox" checked={prompt} onChange={(event) => setParams({ prompt: event.currentTarget.checked ? 1 : null })} />{" "}
          with the prompt
        </label>
        <Legend measure={measure} />
      </div>
      {compared.error && <Failure error={compared.error} retry={compared.reload} />}
      {measure === "trainer" && <p class="hint">A job keeps the trainer's values of its 20 largest differences alone.</p>}
      {scored && score.error && <Failure error={score.error} retry={score.reload} />}
      {scored && !other && <p class="hint">"Score" asks an engine, which first loads the version if no replica holds it.</p>}
      {scored && other && score.loading && <p class="hint">An engine scores the tokens …</p>}
      <Loaded of={tokens}>
        {(data) => (
          <>
            {!data.exact && <p class="hint">This tokenizer has no exact bytes of tokens: texts are of each token alone.</p>}
            <Tokens tokens={data} trainer={trainer} score={score.data} measure={measure} selected={token} onSelect={(place) => setParams({ tok: place })} />
            {token !== null && token >= data.first && token < data.first + data.ids.length && (
              <div class="card">
                <TokenFacts tokens={data} trainer={trainer} score={score.data} place={token} />
              </div>
            )}
          </>
        )}
      </Loaded>
    </>
  );
}

function isScored(measure: Measure): boolean {
  return measure === "delta" || measure === "entropy";
}
