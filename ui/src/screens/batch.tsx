/** Batch: files of requests that the platform answers, how far each is, and the lines that failed. */
import { useState } from "preact/hooks";
import { Action } from "../components/action";
import { CopyAs, quoted } from "../components/copy_as";
import { Download } from "../components/download";
import { Facts } from "../components/facts";
import { ScreenLink } from "../components/screen_link";
import { Empty, Failure, Loaded, NotShown } from "../components/states";
import { Pages, sorted, Table } from "../components/table";
import { address, get, post } from "../lib/api";
import { compact, number, oneLine, percent, seconds, time } from "../lib/format";
import { useKeys } from "../lib/keyboard";
import type { components } from "../lib/openapi";
import { useResource } from "../lib/resource";
import { go, href, setParams } from "../lib/route";
import type { ScreenProps } from ".";

type Entry = components["schemas"]["Batch"];
const PAGE = 50;
const GOES_ON = ["validating", "in_progress", "finalizing", "cancelling"];
const TONES: Record<string, string> = { completed: "good", failed: "bad", expired: "bad", cancelled: "fair", cancelling: "fair" };

export default function Batch({ path, params }: ScreenProps) {
  const id = path[0];
  return id ? <One key={id} id={id} /> : <List params={params} />;
}

function List({ params }: { params: URLSearchParams }) {
  const after = params.get("after") ?? undefined;
  const list = useResource(
    (signal) => get("/v1/batches", { query: { limit: PAGE, after } as never, signal }),
    [after],
    ["batch"],
  );
  const [rows, sort] = sorted(
    list.data?.data ?? [],
    {
      status: (one) => one.status,
      model: (one) => one.model,
      done: share,
      lines: (one) => counts(one).total || null,
      failed: (one) => counts(one).failed,
      sent: (one) => one.created_at,
    },
    !after && !list.data?.has_more,
  );
  const chosen = rows.findIndex((one) => one.id === params.get("at"));
  const select = (n: number) => rows[n] && setParams({ at: rows[n].id });
  useKeys({
    j: ["next batch", () => select(Math.min(rows.length - 1, chosen + 1))],
    k: ["previous batch", () => select(Math.max(0, chosen - 1))],
    Enter: ["open the batch", () => rows[chosen] && go(href(["batch", rows[chosen].id]))],
  });
  return (
    <>
      <div class="row">
        <h1>Batches</h1>
        <span class="spacer" />
        <CopyAs cli="cray-agents batch status" path="/v1/batches" />
      </div>
      <Loaded of={list}>
        {({ data, has_more }) =>
          data.length === 0 ? (
            <Empty>No batch was submitted yet. "cray-agents batch run FILE" sends one.</Empty>
          ) : (
            <div class="section">
              <Table
                label="Batches"
                heads={["batch", "status", "model", "done#", "lines#", "failed#", "sent"]}
                selected={chosen}
                sort={sort}
                rows={rows.map((one) => [
                  <ScreenLink to={["batch", one.id]}>{oneLine(one.id, 60)}</ScreenLink>,
                  <Status batch={one} />,
                  one.model ? oneLine(one.model, 60) : "–",
                  percent(share(one)),
                  known(one) ? number(counts(one).total) : "–",
                  number(counts(one).failed),
                  time(one.created_at),
                ])}
              />
              <Pages after={after} next={has_more && data.at(-1)?.id} />
            </div>
          )
        }
      </Loaded>
    </>
  );
}

function One({ id }: { id: string }) {
  const [cancelling, setCancelling] = useState(false);
  const sent = (signal: AbortSignal) => ({ path: { batch_id: id }, signal });
  const batch = useResource((signal) => get("/v1/batches/{batch_id}", sent(signal)), [id], ["batch"]);
  const errors = useResource((signal) => get("/v1/batches/{batch_id}/errors", sent(signal)), [id], ["batch"]);
  return (
    <Loaded of={batch}>
      {(data) => (
        <>
          <div class="row">
            <h1>
              Batch <span class="mono">{oneLine(id, 80)}</span>
            </h1>
            <Status batch={data} />
            <span class="spacer" />
            {data.output_file_id && (
              <Download path={address("/v1/files/{file_id}/content", { file_id: data.output_file_id })} name={`${id}-results.jsonl`}>
                Download results
              </Download>
            )}
            {data.error_file_id && (
              <Download path={address("/v1/files/{file_id}/content", { file_id: data.error_file_id })} name={`${id}-errors.jsonl`}>
                Download errors
              </Download>
            )}
            {["validating", "in_progress"].includes(data.status) && (
              <button class="danger" onClick={() => setCancelling(true)}>
                Cancel the batch
              </button>
            )}
            <CopyAs
              cli={`cray-agents batch status ${quoted(id)}`}
              python={`await Platform().views.batch_errors(${JSON.stringify(id)})`}
              path={address("/v1/batches/{batch_id}", { batch_id: id })}
            />
          </div>
          <div class="section">
            {data.errors?.data.slice(0, 5).map((one, n) => (
              <p key={n} class="banner error" style={{ margin: 0 }}>
                {one.line ? `Line ${number(one.line)}: ` : ""}
                {oneLine(one.message, 500)}
              </p>
            ))}
            <NotShown count={(data.errors?.data.length ?? 0) - 5} what="errors" />
            <div class="cards">
              <Progress batch={data} />
              <About batch={data} />
              {GOES_ON.includes(data.status) && <Queue />}
            </div>
            <section class="card wide">
              <h2>Failed lines</h2>
              {errors.error && data.error_file_id ? (
                <Failure error={errors.error} retry={errors.reload} />
              ) : (
                <Loaded of={errors}>{(found) => <Errors found={found} />}</Loaded>
              )}
            </section>
          </div>
          {cancelling && (
            <Action
              title="Cancel the batch"
              danger
              cli={() => `cray-agents batch status --cancel ${quoted(id)}`}
              act={(reason) => post("/v1/batches/{batch_id}/cancel", { path: { batch_id: id }, reason }).then(batch.reload)}
              close={() => setCancelling(false)}
            >
              <p style={{ margin: 0 }}>No more lines are sent. The answers so far stay.</p>
            </Action>
          )}
        </>
      )}
    </Loaded>
  );
}

function Progress({ batch }: { batch: Entry }) {
  const { total, completed, failed } = counts(batch);
  const done = completed + failed;
  const goesOn = GOES_ON.includes(batch.status);
  const end = batch.finalizing_at ?? batch.completed_at ?? batch.cancelling_at ?? batch.expired_at;
  const spent = batch.in_progress_at ? (end ?? Date.now() / 1000) - batch.in_progress_at : null;
  const speed = spent && done ? done / spent : null;
  return (
    <section class="card">
      <h2>Progress</h2>
      {known(batch) ? (
        <>
          <p style={{ margin: "0 0 0.4rem" }}>
            <b>{percent(share(batch))}</b> <span class="quiet">of {number(total)} lines</span>
          </p>
          <div class="bar" role="progressbar" aria-label="lines done" aria-valuemin={0} aria-valuemax={total} aria-valuenow={done}>
            <span style={{ width: `${(100 * done) / Math.max(total, 1)}%` }} />
          </div>
          <Facts
            of={[
              ["answered", number(completed)],
              ["failed", <span class={failed ? "error-text" : ""}>{number(failed)}</span>],
              ["speed", speed !== null ? `${number(speed)} lines/s` : goesOn ? "not known yet" : "all in less than a second"],
              ["left", goesOn && (speed === null ? "not known yet" : `about ${seconds((total - done) / speed)}`)],
            ]}
          />
        </>
      ) : (
        <Empty>{batch.status === "failed" ? "No line was sent: the input has errors." : "The input is being checked."}</Empty>
      )}
    </section>
  );
}

function About({ batch }: { batch: Entry }) {
  const { usage } = batch;
  return (
    <section class="card">
      <h2>What it is</h2>
      <Facts
        of={[
          ["model", batch.model ? oneLine(batch.model, 80) : "lines name several, or none yet"],
          ["asks", <span class="mono">{batch.endpoint}</span>],
          [
            "tokens",
            usage
              ? `${compact(usage.input_tokens)} in (${compact(usage.input_tokens_details.cached_tokens)} cached), ${compact(usage.output_tokens)} out`
              : "none yet",
          ],
          ["sent", time(batch.created_at)],
          [batch.completed_at ? "completed" : "must end by", time(batch.completed_at ?? batch.expires_at)],
          ["input", <span class="mono">{oneLine(batch.input_file_id, 60)}</span>],
          ...Object.entries(batch.metadata ?? {}).map(([name, value]): [string, string] => [oneLine(name, 40), oneLine(value, 200)]),
        ]}
      />
    </section>
  );
}

function Queue() {
  const queue = useResource((signal) => get("/v1/queue", { signal }), [], ["pool", "batch"]);
  return (
    <section class="card">
      <h2>Queue</h2>
      <Loaded of={queue}>
        {({ batch, interactive }) => (
          <Facts
            of={[
              ["lines at the engines", number(batch.inside)],
              ["lines waiting", number(batch.waiting)],
              ["people's requests", `${number(interactive.inside)} at the engines, ${number(interactive.waiting)} waiting; they come first`],
            ]}
          />
        )}
      </Loaded>
    </section>
  );
}

function Errors({ found }: { found: components["schemas"]["BatchErrors"] }) {
  if (!found.data.length) {
    return <Empty>{found.lines ? `None of ${number(found.lines)} lines failed.` : "No line has a result yet."}</Empty>;
  }
  return (
    <Table
      label="Failed lines by code"
      heads={["code", "HTTP#", "lines#", "for example"]}
      rows={found.data.map((one) => [
        <span class="mono">{oneLine(one.code, 60)}</span>,
        one.status ?? "–",
        number(one.lines),
        one.examples.map((line, n) => (
          <div key={n}>
            {line.custom_id && <b>{oneLine(line.custom_id, 60)}: </b>}
            {oneLine(line.message, 300) || <span class="hint">no message</span>}
          </div>
        )),
      ])}
    />
  );
}

function Status({ batch }: { batch: Entry }) {
  return <span class={`chip ${TONES[batch.status] ?? ""}`}>{batch.status.replace(/_/g, " ")}</span>;
}

function counts(batch: Entry): { total: number; completed: number; failed: number } {
  const { total = 0, completed = 0, failed = 0 } = batch.request_counts ?? {};
  return { total, completed, failed };
}

/** Tell whether the number of lines is known: it is not while they are counted. */
function known(batch: Entry): boolean {
  return counts(batch).total > 0;
}

function share(batch: Entry): number | null {
  const { total, completed, failed } = counts(batch);
  return total ? (completed + failed) / total : null;
}
