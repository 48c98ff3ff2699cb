/** Report text: a report as the gateway read it; every citation says whether it holds. */
import type { ComponentChildren } from "preact";
import { oneLine, plain } from "../lib/format";
import type { components } from "../lib/openapi";
import { href } from "../lib/route";

type Node = components["schemas"]["ReportNode"];
export type Citation = components["schemas"]["Citation"];

/** Elements of nodes that only hold others. */
const HOLDERS = {
  paragraph: "p",
  em: "em",
  strong: "strong",
  blockquote: "blockquote",
  bullet_list: "ul",
  list_item: "li",
  thead: "thead",
  tbody: "tbody",
  tr: "tr",
  th: "th",
  td: "td",
} as const;

export function ReportText({ nodes, citations }: { nodes: readonly Node[]; citations: readonly Citation[] }) {
  return (
    <article class="report" dir="auto">
      {nodes.map((node, n) => (
        <NodeView key={n} node={node} citations={citations} />
      ))}
    </article>
  );
}

function NodeView({ node, citations }: { node: Node; citations: readonly Citation[] }) {
  const inner = (node.children ?? []).map((child, n) => <NodeView key={n} node={child} citations={citations} />);
  const Holder = HOLDERS[node.kind as keyof typeof HOLDERS];
  if (Holder) return <Holder>{inner}</Holder>;
  switch (node.kind) {
    case "text":
      return <>{plain(node.text ?? "")}</>;
    case "space":
      return <> </>;
    case "break":
      return <br />;
    case "rule":
      return <hr />;
    case "code":
      return <code>{plain(node.text ?? "")}</code>;
    case "code_block":
      return (
        <pre tabIndex={0} role="region" aria-label={`Code ${oneLine(node.info ?? "", 20)}`}>
          {plain(node.text ?? "")}
        </pre>
      );
    case "ordered_list":
      return <ol start={node.start ?? 1}>{inner}</ol>;
    case "table":
      return (
        <div class="table-box" tabIndex={0} role="region" aria-label="Table">
          <table>{inner}</table>
        </div>
      );
    case "heading":
      return <Heading level={node.level ?? 1}>{inner}</Heading>;
    case "link":
      return (
        <Link node={node} citation={typeof node.citation === "number" ? citations[node.citation] : undefined}>
          {inner}
        </Link>
      );
  }
  return <>{inner}</>;
}

/** The page's own heading is the only one of the first level. */
function Heading({ level, children }: { level: number; children: ComponentChildren }) {
  const Tag = `h${Math.min(6, level + 1)}` as "h2";
  return <Tag>{children}</Tag>;
}

function Link({ node, citation, children }: { node: Node; citation?: Citation; children: ComponentChildren }) {
  const to = node.href ?? "";
  if (!citation) {
    if (/^\/?#\//.test(to)) return <a href={to.slice(to.indexOf("#"))}>{children}</a>;
    if (!/^(https?:|mailto:)/i.test(to)) return <>{children}</>;
    return (
      <a href={to} rel="noreferrer noopener" target="_blank">
        {children}
      </a>
    );
  }
  return (
    <span class={citation.ok ? "cited" : "cited broken"}>
      <a href={target(citation)} title={citation.quote ?? undefined}>
        {children}
      </a>{" "}
      {citation.ok ? (
        <span class="chip good">holds</span>
      ) : (
        <span class="chip bad">does not hold: {oneLine(citation.error ?? "", 120)}</span>
      )}
    </span>
  );
}

/** Return the address of what a citation names, with its quote to be marked. */
export function target({ kind, id, at, tokens, quote, href: given }: Citation): string {
  if (kind !== "run" || at === null || at === undefined) return given.slice(given.indexOf("#"));
  return href(["run", id], tokens ? { t: at, tok: tokens[0], mode: "tokens", prompt: 1 } : { t: at, quote });
}
