/** Agreed: what the log-probabilities of trainer and sampler differ by, in a sentence and by token. */
import type { components } from "../lib/openapi";
import { number, oneLine, signed } from "../lib/format";
import { isDemonstration } from "../lib/run_list";
import { ScreenLink } from "./screen_link";
import { Table } from "./table";

type Job = components["schemas"]["JobStatus"];

export function Agreed({ job }: { job: Job }) {
  const { agreement } = job;
  const [run, place, ours, theirs] = agreement?.worst ?? [];
  if (!agreement) return null;
  return (
    <>
      their log-probabilities differed by {number(agreement.max)} nats at most and {number(agreement.mean)} on average, over{" "}
      {number(agreement.tokens)} tokens{agreement.kl != null && ` (KL ${number(agreement.kl)})`}.
      {run && !isDemonstration(run) && (
        <>
          {" "}
          Most at <TokenLink job={job} run={run} place={place!} />: {number(ours)} by the trainer, {number(theirs)} when it was sampled.
        </>
      )}
    </>
  );
}

function TokenLink({ job, run, place }: { job: Job; run: string; place: number }) {
  return (
    <ScreenLink to={["run", run]} params={{ mode: "tokens", tok: place, color: "trainer", job: job.id }}>
      token {place} of {oneLine(run, 40)}
    </ScreenLink>
  );
}

type Difference = [run: string, place: number, ours: number, theirs: number];

/** Return the tokens at which trainer and sampler differed most, the worst first. */
export function differencesOf({ differences, agreement }: Job): Difference[] {
  const { worst } = agreement ?? {};
  return (differences?.length ? differences : worst?.[0] ? [worst] : []) as Difference[];
}

export function Differences({ job }: { job: Job }) {
  const found = differencesOf(job);
  if (!found.length) return null;
  return (
    <section class="card low" tabIndex={0} role="region" aria-label="Where trainer and sampler differ most">
      <h2>Where trainer and sampler differ most</h2>
      <Table
        label="Tokens"
        heads={["token", "trainer#", "sampled#", "difference#"]}
        rows={found.map(([run, place, ours, theirs]) => [
          <span style={{ overflowWrap: "anywhere" }}>{isDemonstration(run) ? oneLine(run, 40) : <TokenLink job={job} run={run} place={place} />}</span>,
          number(ours),
          number(theirs),
          signed(ours - theirs),
        ])}
      />
    </section>
  );
}
