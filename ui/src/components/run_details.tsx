/** Run details: the facts of a run and of its chosen turn, and its rewards. */
import type { ComponentChildren } from "preact";
import { href } from "../lib/route";
import { number, oneLine, seconds, time, told } from "../lib/format";
import type { components } from "../lib/openapi";
import type { RunFacts } from "../lib/records";
import { RewardChip, Version } from "./chips";
import { Facts } from "./facts";
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
        <Facts
          of={[
            ["id", <span class="mono">{oneLine(outline.id)}</span>],
            ["agent", oneLine(facts.agent ?? "")],
            ["model", (facts.models?.length ? facts.models : [facts.model]).slice(0, 10).map((one) => <div key={one}><Version id={one} /></div>)],
            [
              "loop",
              facts.loop && (
                <>
                  <ScreenLink to={["loop", facts.loop]}>{oneLine(facts.loop)}</ScreenLink> iteration {number(facts.iteration)}
                  {facts.attempt !== null && `, attempt ${facts.attempt}`}
                </>
              ),
            ],
            [
              "task",
              facts.task && (
                <>
                  <ScreenLink to={["runs"]} params={{ q: `task:${facts.task}` }}>
                    {oneLine(facts.task, 60)}
                  </ScreenLink>{" "}
                  ({facts.split})
                </>
              ),
            ],
            ["started", time(facts.started)],
            ["imported", facts.imported && oneLine(facts.imported, 60)],
          ]}
        />
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
                  <a href={href(["run", outline.id], { t: one.turn })}>turn {one.turn + 1}</a>
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
          <h2>Turn {turn.n + 1}</h2>
          <Facts
            of={[
              ["version", <Version id={turn.model} />],
              ...turn.seams.map((seam): [string, ComponentChildren] => [`from token ${seam.at}`, <Version id={seam.model} />]),
              ["call", <span class="mono">{oneLine(turn.call_id)}</span>],
              ["API", oneLine(turn.api)],
              ["tokens", `${number(turn.prompt_tokens)} read, ${number(turn.sampled_tokens)} sampled`],
              ["seconds", `${seconds(turn.seconds)}, ${seconds(mark.at ?? 0)} after the start`],
              ["ended by", oneLine(turn.finish_reason ?? "–")],
              ...Object.entries(turn.sampling)
                .slice(0, 30)
                .map(([name, value]): [string, string] => [oneLine(name, 40), oneLine(JSON.stringify(value) ?? "", 200)]),
            ]}
          />
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
