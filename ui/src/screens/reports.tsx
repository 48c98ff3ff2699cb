/** Reports: what people and agents wrote about the platform, with each of their quotes verified. */
import { useState } from "preact/hooks";
import { Action } from "../components/action";
import { CopyAs, quoted } from "../components/copy_as";
import { ReportText, target } from "../components/report_text";
import { Empty, Loaded } from "../components/states";
import { del, get } from "../lib/api";
import { bytes, oneLine, time } from "../lib/format";
import { useKeys } from "../lib/keyboard";
import { useResource } from "../lib/resource";
import { go, href, setParams } from "../lib/route";
import type { ScreenProps } from ".";

const PAGE = 50;

export default function Reports({ path, params }: ScreenProps) {
  const id = path[0];
  return id ? <One key={id} id={id} /> : <List params={params} />;
}

function List({ params }: { params: URLSearchParams }) {
  const after = params.get("after") ?? undefined;
  const list = useResource((signal) => get("/v1/reports", { query: { limit: PAGE, after }, signal }), [after], ["report"]);
  const rows = list.data?.data ?? [];
  const chosen = rows.findIndex((one) => one.id === params.get("at"));
  const select = (n: number) => rows[n] && setParams({ at: rows[n].id });
  useKeys({
    j: ["next report", () => select(Math.min(rows.length - 1, chosen + 1))],
    k: ["previous report", () => select(Math.max(0, chosen - 1))],
    Enter: ["open the report", () => rows[chosen] && go(href(["reports", rows[chosen].id]))],
  });
  return (
    <>
      <div class="row">
        <h1>Reports</h1>
        <span class="spacer" />
        <CopyAs cli="cray-agents reports list" python="[row async for row in Platform().views.reports()]" path="/v1/reports" />
      </div>
      <Loaded of={list}>
        {({ data, has_more, last_id }) =>
          data.length === 0 ? (
            <Empty>No report was written yet. `cray-agents reports write ID FILE.md` writes one, and verifies its quotes.</Empty>
          ) : (
            <>
              <div class="table-box" tabIndex={0} role="region" aria-label="Reports">
                <table>
                  <thead>
                    <tr>
                      <th>report</th>
                      <th>by</th>
                      <th>written</th>
                      <th class="number">size</th>
                    </tr>
                  </thead>
                  <tbody>
                    {data.map((one) => (
                      <tr key={one.id} class={one.id === params.get("at") ? "selected" : ""}>
                        <td>
                          <a href={href(["reports", one.id])} dir="auto">
                            {oneLine(one.title, 120)}
                          </a>{" "}
                          {one.damaged && <span class="chip bad">damaged</span>}
                        </td>
                        <td>{oneLine(one.author, 40)}</td>
                        <td>{time(one.updated)}</td>
                        <td class="number">{bytes(one.bytes)}</td>
                      </tr>
                    ))}
                  </tbody>
                </table>
              </div>
              {has_more && <a href={href(["reports"], { after: last_id })}>Older reports</a>}
            </>
          )
        }
      </Loaded>
    </>
  );
}

function One({ id }: { id: string }) {
  const report = useResource((signal) => get("/v1/reports/{report}", { path: { report: id }, signal }), [id], ["report"]);
  const [deleting, setDeleting] = useState(false);
  return (
    <Loaded of={report}>
      {(data) => {
        const broken = data.citations.filter((one) => !one.ok);
        const titled = data.nodes[0]?.kind === "heading";
        return (
          <>
            <div class="row">
              <h1 dir="auto">{oneLine(data.title, 200)}</h1>
              <span class="spacer" />
              <button onClick={() => setDeleting(true)}>Delete</button>
              <CopyAs
                cli={`cray-agents reports show ${quoted(id)}`}
                python={`await Platform().views.report(${JSON.stringify(id)})`}
                path={`/v1/reports/${encodeURIComponent(id)}`}
              />
            </div>
            <p class="quiet">
              {oneLine(data.author, 60)} {time(data.updated)} ·{" "}
              {data.citations.length - broken.length} of {data.citations.length} citations hold now
            </p>
            {broken.length > 0 && (
              <div class="banner" role="alert">
                <ul>
                  {broken.slice(0, 20).map((one, n) => (
                    <li key={n}>
                      <a href={target(one)}>{oneLine(one.label, 80) || oneLine(one.href, 80)}</a>: {oneLine(one.error ?? "", 200)}
                    </li>
                  ))}
                </ul>
                {broken.length > 20 && <p>and {broken.length - 20} more</p>}
              </div>
            )}
            <ReportText nodes={titled ? data.nodes.slice(1) : data.nodes} citations={data.citations} />
            {deleting && (
              <Action
                title="Delete the report"
                danger
                cli={() => `cray-agents reports delete ${quoted(id)}`}
                act={async (reason) => {
                  await del("/v1/reports/{report}", { path: { report: id }, reason });
                  go(href(["reports"]));
                }}
                close={() => setDeleting(false)}
              />
            )}
          </>
        );
      }}
    </Loaded>
  );
}
