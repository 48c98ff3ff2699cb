/** Agreed: what the log-probabilities of trainer and sampler differ by, in a sentence, with the worst token. */
import type { components } from "../lib/openapi";
import { number, oneLine } from "../lib/format";
import { isDemonstration } from "../lib/run_list";
import { features } from "../lib/session";
import { ScreenLink } from "./screen_link";

export function Agreed({ job }: { job: components["schemas"]["JobStatus"] }) {
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
          Most at{" "}
          <ScreenLink
            to={["run", run]}
            params={{ mode: "tokens", tok: place, color: features.value.includes("score") ? "delta" : null }}
          >
            token {place} of {oneLine(run, 40)}
          </ScreenLink>
          : {number(ours)} by the trainer, {number(theirs)} when it was sampled.
        </>
      )}
    </>
  );
}
