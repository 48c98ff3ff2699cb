/** Virtual list: of any number of rows only those in sight are in the page. Rows may have any height. */
import {
  Virtualizer,
  elementScroll,
  observeElementOffset,
  observeElementRect,
  type VirtualItem,
} from "@tanstack/virtual-core";
import type { ComponentChildren } from "preact";
import { useLayoutEffect, useReducer, useRef } from "preact/hooks";

export interface VirtualListProps {
  count: number;
  /** Height of a row in pixels, before it is measured. */
  estimate: number;
  label: string;
  row: (index: number) => ComponentChildren;
  keyOf?: (index: number) => string | number;
  /** The row to have in sight; scrolled to when it changes. */
  selected?: number;
  /** The selected row is scrolled to once more when this changes, as when its content has come. */
  again?: boolean;
  align?: "auto" | "start";
  /** Called with the rows that are in the page. */
  onRange?: (first: number, last: number) => void;
  class?: string;
  /** A table: its head, which stays in sight, as a row; each row then has cells. */
  head?: ComponentChildren;
}

export function VirtualList(props: VirtualListProps) {
  const { count, estimate, label, row, keyOf, selected, align = "auto" } = props;
  const scroller = useRef<HTMLDivElement>(null);
  const [, rerender] = useReducer<number, void>((n) => n + 1, 0);
  const made = useRef<Virtualizer<HTMLDivElement, HTMLElement> | null>(null);
  const options = {
    count,
    getScrollElement: () => scroller.current,
    estimateSize: () => estimate,
    getItemKey: keyOf ?? ((index: number) => index),
    overscan: 4,
    scrollPaddingEnd: scroller.current?.querySelector<HTMLElement>(".head")?.offsetHeight ?? 0,
    scrollToFn: elementScroll,
    observeElementRect,
    observeElementOffset,
    onChange: () => rerender(),
  };
  made.current ??= new Virtualizer(options);
  const list = made.current;
  list.setOptions(options);
  useLayoutEffect(() => list._didMount(), []);
  useLayoutEffect(() => list._willUpdate());
  useLayoutEffect(() => {
    if (selected !== undefined && selected >= 0 && selected < count) list.scrollToIndex(selected, { align });
  }, [selected, count > 0, props.again]);
  const items = list.getVirtualItems();
  const isTable = props.head !== undefined;
  const [first, last] = [items[0]?.index ?? 0, items.at(-1)?.index ?? -1];
  useLayoutEffect(() => props.onRange?.(first, last), [first, last]);
  return (
    <div
      class={`virtual ${props.class ?? ""}`}
      ref={scroller}
      tabIndex={0}
      role={isTable ? "table" : "region"}
      aria-label={label}
      aria-rowcount={isTable ? count + 1 : undefined}
    >
      {isTable && (
        <div class="head" role="rowgroup">
          <div role="row">{props.head}</div>
        </div>
      )}
      <div class="space" role={isTable ? "rowgroup" : "list"} style={{ height: `${list.getTotalSize()}px` }}>
        {items.map((item: VirtualItem) => (
          <div
            key={item.key}
            class="item"
            role={isTable ? "row" : "listitem"}
            data-index={item.index}
            aria-setsize={isTable ? undefined : count}
            aria-posinset={isTable ? undefined : item.index + 1}
            aria-rowindex={isTable ? item.index + 2 : undefined}
            ref={(element) => {
              if (element) list.measureElement(element);
            }}
            style={{ transform: `translateY(${item.start}px)` }}
          >
            {row(item.index)}
          </div>
        ))}
      </div>
    </div>
  );
}
