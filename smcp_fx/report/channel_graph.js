// The channel graph's interaction: explain what is pointed at, hold what is clicked, search. Without it the page
// shows the same drawing with plain tips.
"use strict";
(() => {
  const root = document.querySelector(".cg");
  if (!root) return;
  document.documentElement.classList.add("js");
  const { groups, layers } = JSON.parse(document.getElementById("cg-data").textContent);
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
  const MOST = 12; // names a list shows
  const list = (title, names) => {
    if (!names || !names.length) return [];
    const items = make("ul");
    for (const name of names.slice(0, MOST)) items.append(make("li", name));
    if (names.length > MOST) items.append(make("li", `and ${names.length - MOST} more`));
    return [make("div", title), items];
  };
  const shape = (sizes) => (sizes && sizes.length ? sizes.join(" \u00d7 ") : "");
  const counts = (permitted) => {
    if (!permitted || permitted.length < 2) return "";
    const step = permitted[1] - permitted[0];
    const even = permitted.every((count, index) => !index || count - permitted[index - 1] === step);
    const shown = permitted.length <= 6 ? permitted.join(", ") : even
      ? `${permitted[0]}, ${permitted[1]}, \u2026 ${permitted[permitted.length - 1]}`
      : `${permitted.slice(0, 4).join(", ")}, \u2026 ${permitted[permitted.length - 1]}`;
    return `may keep ${shown}`;
  };
  const describeLayer = (path) => {
    const layer = layers[path];
    if (!layer) return [];
    const kind = layer.kind === "depthwise" ? "depthwise, " : layer.groups > 1 ? `${layer.groups} groups, ` : "";
    const parts = [
      layer.weight_shape && `${kind}weight ${shape(layer.weight_shape)}`,
      layer.in_shape && `in ${shape(layer.in_shape)}`,
      layer.out_shape && `out ${shape(layer.out_shape)}`,
    ].filter(Boolean);
    return parts.map((part) => make("p", part, "shape"));
  };
  const along = (group, side, verb) => {
    const uses = (group.channels || []).filter((use) => use[1] === side);
    const what = side === "in" ? "input" : "output";
    return list(verb, uses.map(([path, , count]) => `${count} ${what}${count > 1 ? "s" : ""} of ${path}`));
  };
  const describe = (index) => {
    const group = groups[index];
    const pinned = group.pinned || [];
    const reasons = list(pinned.length ? "Must stay whole:" : "", pinned);
    reasons.forEach((node) => node.classList.add("why"));
    const size = group.kept === undefined ? `${group.size} units` : `${group.kept} of ${group.size} channels kept`;
    const gone = [...along(group, "out", "With each unit go"), ...along(group, "in", "and with it")];
    return [
      make("h3", group.name),
      make("p", [size, pinned.length ? "" : "free", counts(group.permitted)].filter(Boolean).join(", ")),
      ...reasons,
      ...(group.channels && !pinned.length
        ? gone
        : [...list("Written by", group.producers), ...list("Read by", group.consumers)]),
    ];
  };
  const describeAll = (indices, title) => {
    const nodes = title || [];
    for (const index of indices.slice(0, 20)) nodes.push(...describe(index));
    if (indices.length > 20) nodes.push(make("p", `and ${indices.length - 20} more groups`));
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
      svg.classList.toggle("picked", wanted.size > 0 && held !== null);
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
    const paths = target.dataset.layers ? target.dataset.layers.split("\n") : [];
    const ends = paths.length > 1 ? [paths[0], paths[paths.length - 1]] : paths;
    const title = [
      make("h3", `${target.dataset.name}${paths.length > 1 ? ` (${paths.length} layers)` : ""}`),
      ...ends.flatMap((path) => [...(paths.length > 1 ? [make("div", path)] : []), ...describeLayer(path)]),
      make("p", `touches ${indices.length} group${indices.length === 1 ? "" : "s"}:`),
    ];
    return { indices, words: describeAll(indices, title) };
  };
  // Zooming sets the drawing's size, moving scrolls its box: both stay sharp, and the scroll bars tell where one is.
  const box = root.querySelector(".scroll");
  const drawings = [...root.querySelectorAll(".level .graph")];
  const sizes = drawings.map((svg) => [svg.viewBox.baseVal.width, svg.viewBox.baseVal.height]);
  let scale = 1;
  let dragged = false;
  const zoom = (wanted, x = box.clientWidth / 2, y = box.clientHeight / 2) => {
    const before = scale;
    scale = Math.min(4, Math.max(0.05, wanted));
    drawings.forEach((svg, index) => {
      svg.setAttribute("width", sizes[index][0] * scale);
      svg.setAttribute("height", sizes[index][1] * scale);
    });
    box.scrollLeft = (box.scrollLeft + x) * (scale / before) - x;
    box.scrollTop = (box.scrollTop + y) * (scale / before) - y;
  };
  const fit = () => {
    const shown = drawings.findIndex((svg) => svg.getClientRects().length);
    if (shown < 0) return;
    const room = Math.max(200, parseFloat(getComputedStyle(box).maxHeight) || box.clientHeight);
    zoom(Math.min(1.5, box.clientWidth / sizes[shown][0], room / sizes[shown][1]));
  };
  const zooms = {
    "zoom in": () => zoom(scale * 1.25),
    "zoom out": () => zoom(scale / 1.25),
    fit,
    "true size": () => zoom(1),
  };
  for (const button of root.querySelectorAll("[data-zoom]")) {
    button.addEventListener("click", zooms[button.dataset.zoom]);
  }
  const keys = { "+": "zoom in", "=": "zoom in", "-": "zoom out", 0: "fit", 1: "true size" };
  root.addEventListener("keydown", (event) => {
    if (event.target === search || event.ctrlKey || event.metaKey || !keys[event.key]) return;
    event.preventDefault();
    zooms[keys[event.key]]();
  });
  box.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return; // a pinch comes as Ctrl and the wheel
    event.preventDefault();
    const at = box.getBoundingClientRect();
    zoom(scale * Math.exp(-event.deltaY / 300), event.clientX - at.left, event.clientY - at.top);
  }, { passive: false });
  box.addEventListener("pointerdown", (event) => {
    dragged = false;
    if (event.button !== 0 || event.pointerType === "touch") return; // a finger scrolls by itself
    const from = [event.clientX, event.clientY, box.scrollLeft, box.scrollTop];
    const move = (now) => {
      const [dx, dy] = [now.clientX - from[0], now.clientY - from[1]];
      if (!dragged && Math.hypot(dx, dy) < 4) return;
      dragged = true;
      box.classList.add("moving");
      box.scrollLeft = from[2] - dx;
      box.scrollTop = from[3] - dy;
    };
    const end = () => {
      box.classList.remove("moving");
      setTimeout(() => (dragged = false)); // after the click that ends the move
      window.removeEventListener("pointermove", move);
      window.removeEventListener("pointerup", end);
      window.removeEventListener("pointercancel", end);
    };
    window.addEventListener("pointermove", move);
    window.addEventListener("pointerup", end);
    window.addEventListener("pointercancel", end);
  });

  const thing = (event) => event.target.closest(".lane, .row");

  for (const svg of root.querySelectorAll(".level .graph")) {
    svg.querySelectorAll(".lane > title, .row > title").forEach((title) => title.remove()); // the panel says more
    const glance = (event) => {
      const target = thing(event);
      if (!target || held) return;
      const { indices, words } = explain(target);
      light(indices);
      say(words);
    };
    svg.addEventListener("pointerover", glance);
    svg.addEventListener("focusin", glance);
    svg.addEventListener("pointerleave", () => held || light([]));
    svg.addEventListener("click", (event) => {
      if (dragged) return; // the end of a move
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
    const inside = new Set(row.dataset.layers.split("\n"));
    const level = root.querySelector(`.level-${next.value}`);
    const first = [...level.querySelectorAll(".row")].find((other) =>
      other.dataset.layers.split("\n").some((path) => inside.has(path))
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
