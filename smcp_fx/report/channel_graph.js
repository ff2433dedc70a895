// The channel graph's interaction: explain what is pointed at, hold what is clicked, search. Without it the page
// shows the same drawing with plain tips.
"use strict";
(() => {
  const root = document.querySelector(".cg");
  if (!root) return;
  document.documentElement.classList.add("js");
  const groups = JSON.parse(document.getElementById("cg-data").textContent);
  const panel = document.getElementById("cg-panel");
  const found = document.getElementById("cg-found");
  const search = document.getElementById("cg-search");
  const intro = [...panel.childNodes];
  let held = null; // {groups, words}: indices that are lit, and the panel's content

  const make = (name, text, kind) => {
    const node = document.createElement(name);
    if (text !== undefined) node.textContent = text;
    if (kind) node.className = kind;
    return node;
  };
  const list = (title, names) => {
    if (!names || !names.length) return [];
    const items = make("ul");
    for (const name of names) items.append(make("li", name));
    return [make("div", title), items];
  };
  const describe = (index) => {
    const group = groups[index];
    const pinned = group.pinned || [];
    const reasons = list(pinned.length ? "Must stay whole:" : "", pinned);
    reasons.forEach((node) => node.classList.add("why"));
    return [
      make("h3", group.name),
      make("p", `${group.kept} of ${group.size} channels kept${pinned.length ? "" : ", free"}`),
      ...reasons,
      ...list("Written by", group.producers),
      ...list("Read by", group.consumers),
    ];
  };
  const describeAll = (indices, title) => {
    const nodes = title ? [make("h3", title)] : [];
    for (const index of indices.slice(0, 30)) nodes.push(...describe(index));
    if (indices.length > 30) nodes.push(make("p", `and ${indices.length - 30} more groups`));
    return nodes;
  };
  const numbers = (text) => (text ? text.split(" ").map(Number) : []);
  const groupsOfRow = (row) => {
    const key = row.dataset.row;
    const crossing = [...row.parentNode.querySelectorAll(".lane")].filter((lane) =>
      lane.dataset.rows.split(" ").includes(key)
    );
    return [...new Set([...crossing.flatMap((lane) => numbers(lane.dataset.groups)), ...numbers(row.dataset.inside)])];
  };
  const light = (indices) => {
    const wanted = new Set(indices);
    for (const svg of root.querySelectorAll(".level .graph")) {
      svg.classList.toggle("picked", wanted.size > 0);
      const rows = new Set();
      for (const lane of svg.querySelectorAll(".lane")) {
        const on = numbers(lane.dataset.groups).some((index) => wanted.has(index));
        lane.classList.toggle("on", on);
        if (on) lane.dataset.rows.split(" ").forEach((row) => rows.add(row));
      }
      for (const row of svg.querySelectorAll(".row")) {
        const inside = numbers(row.dataset.inside).some((index) => wanted.has(index));
        row.classList.toggle("on", inside || rows.has(row.dataset.row));
      }
    }
  };
  const say = (nodes) => panel.replaceChildren(...nodes);
  const hold = (indices, words) => {
    held = indices.length ? { indices, words } : null;
    light(indices);
    say(held ? words : intro);
  };
  const explain = (target) => {
    if (target.classList.contains("lane")) {
      const indices = numbers(target.dataset.groups);
      return { indices, words: describeAll(indices) };
    }
    const indices = groupsOfRow(target);
    const layers = target.dataset.layers ? target.dataset.layers.split("\n") : [];
    const title = `${target.dataset.name}${layers.length > 1 ? ` (${layers.length} layers)` : ""}`;
    return { indices, words: describeAll(indices, `${title} touches ${indices.length} groups`) };
  };
  const thing = (event) => event.target.closest(".lane, .row");

  for (const svg of root.querySelectorAll(".level .graph")) {
    svg.querySelectorAll(".lane > title, .row > title").forEach((title) => title.remove()); // the panel says more
    svg.addEventListener("pointerover", (event) => {
      const target = thing(event);
      if (target && !held) say(explain(target).words);
    });
    svg.addEventListener("focusin", (event) => {
      const target = thing(event);
      if (target && !held) say(explain(target).words);
    });
    svg.addEventListener("click", (event) => {
      const target = thing(event);
      if (!target) return hold([], []);
      if (target.dataset.expand && event.target.closest(".folded, .plus")) return deeper(target);
      const { indices, words } = explain(target);
      const again = held && held.indices.join() === indices.join();
      search.value = "";
      found.textContent = "";
      hold(again ? [] : indices, words);
    });
    svg.addEventListener("keydown", (event) => {
      const target = thing(event);
      if (target && (event.key === "Enter" || event.key === " ")) {
        event.preventDefault();
        target.dispatchEvent(new MouseEvent("click", { bubbles: true }));
      } else if (event.key === "Escape") hold([], []);
    });
  }
  const deeper = (row) => {
    const tabs = [...root.querySelectorAll(".tabs input")];
    const next = tabs[tabs.findIndex((tab) => tab.checked) + 1];
    if (!next) return;
    next.checked = true;
    const layers = new Set(row.dataset.layers.split("\n"));
    const level = root.querySelector(`.level-${next.value}`);
    const first = [...level.querySelectorAll(".row")].find((other) =>
      other.dataset.layers.split("\n").some((layer) => layers.has(layer))
    );
    if (first) first.scrollIntoView({ block: "center" });
  };
  search.addEventListener("input", () => {
    const words = search.value.trim().toLowerCase();
    const hits = [];
    if (words) {
      groups.forEach((group, index) => {
        const all = [group.name, ...(group.producers || []), ...(group.consumers || []), ...(group.pinned || [])];
        if (all.some((text) => String(text).toLowerCase().includes(words))) hits.push(index);
      });
    }
    found.textContent = words ? `${hits.length} group${hits.length === 1 ? "" : "s"}` : "";
    hold(hits, describeAll(hits));
  });
  search.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || !held) return;
    const lane = [...root.querySelectorAll(".level .lane.on, .level .row.on")].find((node) => node.getClientRects().length);
    if (lane) lane.scrollIntoView({ block: "center", inline: "center" });
  });
})();
