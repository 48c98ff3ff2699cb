/** Run details: the facts of a run and of its chosen turn, and its rewards. */
import { href } from "../lib/route";
import { number, oneLine, seconds, time, told } from "../lib/format";
import type { components } from "../lib/openapi";
import type { RunFacts } from "../lib/records";
import { RewardChip, Version } from "./chips";
import { Json } from "./json";
import type { Outline } from "./run_outline";
import { ScreenLink } from "./screen_link";
import { NotShown } from "./states";
import { Text } from "./text";

export function Details(props: {
  outline: Outline;
  facts: RunFacts;
  turn: components["schemas"]["ShownTurn"] | undefined;
  mark: components["schemas"]["TurnMark"] | undefined;
}) {
  const { outline, facts, turn, mark } = props;
  return (
    <aside class="details" aria-label="Details" tabIndex={0}>
      <section class="card">
        <h2>Run</h2>
        <dl class="facts">
          <dt>id</dt>
          <dd class="mono">{oneLine(outline.id)}</dd>
          <dt>agent</dt>
          <dd>{oneLine(facts.agent ?? "")}</dd>
          <dt>model</dt>
          <dd>{(facts.models?.length ? facts.models : [facts.model]).slice(0, 10).map((one) => <div key={one}><Version id={one} /></div>)}</dd>
          {facts.loop && (
            <>
              <dt>loop</dt>
              <dd>
                <ScreenLink to={["loop", facts.loop]}>{oneLine(facts.loop)}</ScreenLink> iteration {number(facts.iteration)}
                {facts.attempt !== null && `, attempt ${facts.attempt}`}
              </dd>
            </>
          )}
          {facts.task && (
            <>
              <dt>task</dt>
              <dd>
                <ScreenLink to={["runs"]} params={{ q: `task:${facts.task}` }}>
                  {oneLine(facts.task, 60)}
                </ScreenLink>{" "}
                ({facts.split})
              </dd>
            </>
          )}
          <dt>started</dt>
          <dd>{time(facts.started)}</dd>
          {facts.imported && (
            <>
              <dt>imported</dt>
              <dd>{oneLine(facts.imported, 60)}</dd>
            </>
          )}
        </dl>
        {outline.error && (
          <>
            <h3 class="error-text">{oneLine(String(outline.error.type ?? "error"), 60)}</h3>
            <Text text={String(outline.error.message ?? "")} lines={8} label="the error" />
          </>
        )}
      </section>
      {(outline.target !== null || Object.keys(outline.metadata).length > 0) && (
        <section class="card">
          <h2>Task</h2>
          {outline.target !== null && (
            <>
              <h3>target</h3>
              <Text text={told(outline.target)} lines={8} label="the target" />
            </>
          )}
          {Object.keys(outline.metadata).length > 0 && <Json name="metadata" value={outline.metadata} open />}
        </section>
      )}
      {outline.rewards.length > 0 && (
        <section class="card">
          <h2>Rewards</h2>
          {outline.rewards.slice(0, 50).map((one, n) => (
            <div key={n}>
              <RewardChip name={one.name} value={one.value} source={one.source} turn={one.turn} />{" "}
              <span class="quiet">
                {one.turn !== null && one.turn !== undefined && (
                  <a href={href(["run", outline.id], { t: one.turn })}>turn {one.turn}</a>
                )}{" "}
                {oneLine(one.source ?? "", 40)} {oneLine(one.giver ?? "", 40)}
              </span>
              {one.comment && <Text text={one.comment} lines={4} label="the comment" />}
            </div>
          ))}
          <NotShown count={outline.rewards.length - 50} what="rewards" />
        </section>
      )}
      {turn && mark && (
        <section class="card">
          <h2>Turn {turn.n}</h2>
          <dl class="facts">
            <dt>version</dt>
            <dd>
              <Version id={turn.model} />
            </dd>
            {turn.seams.map((seam) => (
              <div key={seam.at} style={{ display: "contents" }}>
                <dt>from token {seam.at}</dt>
                <dd>
                  <Version id={seam.model} />
                </dd>
              </div>
            ))}
            <dt>call</dt>
            <dd class="mono">{oneLine(turn.call_id)}</dd>
            <dt>API</dt>
            <dd>{oneLine(turn.api)}</dd>
            <dt>tokens</dt>
            <dd>
              {number(turn.prompt_tokens)} read, {number(turn.sampled_tokens)} sampled
            </dd>
            <dt>seconds</dt>
            <dd>
              {seconds(turn.seconds)}, {seconds(mark.at ?? 0)} after the start
            </dd>
            <dt>ended by</dt>
            <dd>{oneLine(turn.finish_reason ?? "–")}</dd>
            {Object.entries(turn.sampling)
              .slice(0, 30)
              .map(([name, value]) => (
                <div key={name} style={{ display: "contents" }}>
                  <dt>{oneLine(name, 40)}</dt>
                  <dd>{oneLine(JSON.stringify(value) ?? "", 200)}</dd>
                </div>
              ))}
          </dl>
          {turn.tools && turn.tools.length > 0 && (
            <details>
              <summary>tools defined: {turn.tools.length}</summary>
              <ul>
                {turn.tools.slice(0, 100).map((tool, n) => (
                  <li key={n}>{oneLine(String((tool as { function?: { name?: unknown } }).function?.name ?? "?"), 80)}</li>
                ))}
              </ul>
              <NotShown count={turn.tools.length - 100} what="tools" />
            </details>
          )}
        </section>
      )}
    </aside>
  );
}
