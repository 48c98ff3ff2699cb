/** Pages: an answer in pages as one, where a part of it would be taken for all. */

interface Page {
  data: unknown[];
  has_more: boolean;
  last_id: string | null;
}

/** Load page after page, each after the last row of the one before. */
export async function wholeOf<P extends Page>(load: (after: string | undefined) => Promise<P>): Promise<P> {
  const whole = await load(undefined);
  while (whole.has_more && whole.last_id !== null) {
    const next = await load(whole.last_id);
    whole.data.push(...next.data);
    whole.has_more = next.has_more && next.data.length > 0;
    whole.last_id = next.last_id;
  }
  return whole;
}
