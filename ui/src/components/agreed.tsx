/** Agreed: what the log-probabilities of trainer and sampler differ by, in a sentence, with the worst token. */
import type { components } from "../lib/openapi";
import { number, oneLine } from "../lib/format";
import { isDemonstration } from "../lib/run_list";
import { features } from "../lib/session";
import { ScreenLink } from "./screen_link";

export function Agreed({ job }: { job: components["schemas"]["JobStatus"] }) {
  const { agreement, worst_token: worst } = job;
  if (!agreement) return null;
  return (
    <>
      their log-probabilities differed by {number(agreement.max)} nats at most and {number(agreement.mean)} on average, over{" "}
      {number(agreement.tokens)} tokens{agreement.kl != null && ` (KL ${number(agreement.kl)})`}.
      {worst && !isDemonstration(worst.run_id) && (
        <>
          {" "}
          Most at{" "}
          <ScreenLink
            to={["run", worst.run_id]}
            params={{ mode: "tokens", tok: worst.place, color: features.value.includes("score") ? "delta" : null }}
          >
            token {worst.place} of {oneLine(worst.run_id, 40)}
          </ScreenLink>
          : {number(worst.ours)} by the trainer, {number(worst.theirs)} when it was sampled.
        </>
      )}
    </>
  );
}
